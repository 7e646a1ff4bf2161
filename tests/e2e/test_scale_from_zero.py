"""Workers scaled to zero: a new gateway accepts requests, whose queue a scaler reads, and a new worker answers them."""

import asyncio
from pathlib import Path

import aiohttp
import pytest

from shared.redis_client import connect
from shared.redis_keys import RedisKeys
from tests.conftest import Valkey
from tests.e2e.batch_load import prompt_of, start_workers
from tests.e2e.fleet import Api, connected, running_fleet
from tests.tiny_model import write_tiny_model

MODEL = "tiny"
NUM_REQUESTS = 100

pytestmark = pytest.mark.timeout(600)


async def test_requests_without_workers_wait_for_a_scaler(valkey_server: Valkey, tmp_path: Path) -> None:
    common = ["--model", str(write_tiny_model(tmp_path / MODEL)), "--served-model-name", MODEL]
    common += ["--redis-url", valkey_server.url, "--store-namespace", "zero"]
    gateway = ["-m", "gateway", *common, "--no-worker", "queue", "--port"]
    keys, connections = RedisKeys(MODEL, "zero"), connect(valkey_server.url)
    with running_fleet(tmp_path / "logs") as fleet:
        async with connected(f"http://127.0.0.1:{fleet.port}", MODEL) as api:
            fleet.start("gateway", *gateway, str(fleet.port))
            start_workers(fleet, common, "first")
            await api.wait_until_ready(fleet)
            for name in ("first", "gateway"):
                process = fleet.processes.pop(name)
                process.terminate()
                process.wait()
            fleet.start("gateway", *gateway, str(fleet.port))
            await until_it_waits(api)
            prompts = [prompt_of(number) for number in range(NUM_REQUESTS)]
            asked = asyncio.ensure_future(api.complete_all(prompts, 3, ignore_eos=True))
            while await connections.commands.xlen(keys.queue("interactive")) < NUM_REQUESTS:
                assert not asked.done()
                await asyncio.sleep(0.05)  # polls the store
            start_workers(fleet, common, "second")
            answered = await asked
            assert all(answer.completion_tokens == 3 for answer in answered)
    await connections.aclose()


async def until_it_waits(api: Api) -> None:
    """Return when the gateway accepts requests without a worker."""
    while True:
        try:
            if await api.state("/readyz") == (200, "waiting"):
                return
        except aiohttp.ClientConnectionError:
            pass  # it does not listen yet
        await asyncio.sleep(0.1)  # polls another process
