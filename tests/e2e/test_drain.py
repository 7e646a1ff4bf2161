"""SIGTERM at a gateway: the open stream ends, a new request gets 503 `draining`, and the port still answers probes."""

import asyncio
import signal
from pathlib import Path

import aiohttp
import pytest

from tests.conftest import Valkey
from tests.e2e.fleet import STOP_SECONDS, Answer, connected, running_fleet
from tests.tiny_model import write_tiny_model

pytestmark = pytest.mark.timeout(120)
SCRIPT = str(Path(__file__).with_name("scripted_worker.py"))
NUM_TOKENS = 40


async def test_gateway_that_ends_refuses_new_requests_and_finishes_open_ones(valkey: Valkey, tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "tiny")
    pace = tmp_path / "pace"
    pace.write_text("0.05")
    with running_fleet(tmp_path / "logs") as fleet:
        common = ["--model", str(model), "--redis-url", valkey.url]
        gateway = fleet.start("gateway", "-m", "gateway", "--port", str(fleet.port), *common)
        worker = [*common, "--script-pace-file", str(pace), "--script-ignore-eos", "--metrics-port", "0"]
        fleet.start("worker", SCRIPT, *worker, PYTHONPATH=".")
        url = f"http://127.0.0.1:{fleet.port}"
        async with connected(url, "tiny") as api, aiohttp.ClientSession(url) as session:
            await api.wait_until_ready(fleet)
            answer = Answer()
            stream = asyncio.create_task(api.complete(answer, [5, 6, 7], NUM_TOKENS))
            while not answer.completion_tokens and not answer.text:
                await asyncio.sleep(0.01)  # polls another process
            gateway.send_signal(signal.SIGTERM)
            body = {"model": "tiny", "prompt": [5, 6], "max_tokens": 1}
            while True:  # until the signal has arrived
                async with session.post("/v1/completions", json=body) as refused:
                    answered = await refused.json()
                    if refused.status == 503:
                        break
            assert answered["error"]["code"] == "draining"
            async with aiohttp.ClientSession(url) as another, another.get("/livez") as probe:
                assert probe.status == 200
            pace.write_text("0")
            await stream
            assert answer.completion_tokens == NUM_TOKENS and answer.finish_reasons == ["length"]
        assert await asyncio.to_thread(gateway.wait, STOP_SECONDS) == 0
