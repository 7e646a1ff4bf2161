"""2,000 lines beside a chat load, and a worker killed midway: every line has exactly one result."""

import asyncio
import json
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.builders import expected_output, make_request
from tests.conftest import Valkey
from tests.e2e.fleet import Answer, Api, Fleet, connected, running_fleet
from tests.tiny_model import write_tiny_model

pytestmark = [pytest.mark.e2e, pytest.mark.redis, pytest.mark.timeout(180)]

NUM_LINES = 2_000
MAX_TOKENS = 3
SCRIPT = str(Path(__file__).with_name("scripted_worker.py"))
# Steps of 2 ms, so that the batch takes some seconds; a dead worker is missed after three instead of fifteen.
WORKER_FLAGS = ["--script-step-seconds", "0.002", "--metrics-port", "0", "--dead-after-seconds", "3"]


@pytest.fixture
def fleet(valkey: Valkey, tmp_path: Path) -> Iterator[Fleet]:
    model = write_tiny_model(tmp_path / "tiny")
    with running_fleet(tmp_path / "logs") as fleet:
        common = ["--model", str(model), "--served-model-name", "tiny", "--redis-url", valkey.url]
        fleet.start("gateway", "-m", "gateway", *common, "--port", str(fleet.port))
        for name in ("w0", "w1"):
            fleet.start(name, SCRIPT, *common, "--worker-id", name, *WORKER_FLAGS, PYTHONPATH=".")
        yield fleet


@pytest.fixture
async def api(fleet: Fleet) -> AsyncIterator[Api]:
    async with connected(f"http://127.0.0.1:{fleet.port}", "tiny") as api:
        await api.wait_until_ready(fleet, num_workers=2)
        yield api


def prompt_of(number: int) -> list[int]:
    return [3 + number % 300, 3 + number // 300, 7]


def batch_lines() -> Iterator[str]:
    for number in range(NUM_LINES):
        body = {"model": "tiny", "prompt": prompt_of(number), "max_tokens": MAX_TOKENS, "temperature": 0}
        body |= {"ignore_eos": True, "return_token_ids": True}
        yield json.dumps({"custom_id": f"line-{number}", "method": "POST", "url": "/v1/completions", "body": body})


async def run_batch(fleet: Fleet, folder: Path, *, kill_midway: bool) -> None:
    output = folder / "out.jsonl"
    command = ["-m", "pagestream", "run-batch", "-i", str(folder / "in.jsonl"), "-o", str(output)]
    url = f"http://127.0.0.1:{fleet.port}"
    process = await asyncio.create_subprocess_exec(sys.executable, *command, "--url", url, "--concurrency", "48")
    while kill_midway and (not output.exists() or output.read_bytes().count(b"\n") < NUM_LINES // 3):
        assert process.returncode is None, fleet.all_logs()
        await asyncio.sleep(0.02)  # polls a file of another process
    if kill_midway:
        fleet.processes["w0"].kill()
    assert await process.wait() == 0, fleet.all_logs()


async def test_every_line_has_exactly_one_result(api: Api, fleet: Fleet, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text("\n".join(batch_lines()))
    ended = asyncio.Event()

    async def chat() -> int:
        num_answers = 0
        while not ended.is_set():
            answer = await api.complete(Answer(), prompt_of(num_answers), 8, ignore_eos=True)
            assert answer.completion_tokens == 8
            num_answers += 1
        return num_answers

    chats = [asyncio.create_task(chat()) for _ in range(4)]
    await run_batch(fleet, tmp_path, kill_midway=True)
    ended.set()
    assert min(await asyncio.gather(*chats)) > 0
    results = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert Counter(result["custom_id"] for result in results) == Counter(f"line-{n}" for n in range(NUM_LINES))
    for result in results:
        assert result["response"]["status_code"] == 200, result
        (choice,) = result["response"]["body"]["choices"]
        prompt = prompt_of(int(result["custom_id"].removeprefix("line-")))
        request = make_request(prompt, max_tokens=MAX_TOKENS, ignore_eos=True)
        assert choice["token_ids"] == expected_output(request, max_num_tokens=2048)
    before = (tmp_path / "out.jsonl").read_bytes()
    await run_batch(fleet, tmp_path, kill_midway=False)  # there is nothing left to ask
    assert (tmp_path / "out.jsonl").read_bytes() == before
