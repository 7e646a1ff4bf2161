"""run-batch beside chats, with a worker killed in between: every line has exactly one result."""

import asyncio
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.conftest import Valkey
from tests.e2e.batch_load import batch_lines, chats, check_results, start_workers
from tests.e2e.fleet import Api, Fleet, connected, running_fleet
from tests.tiny_model import write_tiny_model

pytestmark = pytest.mark.timeout(600)
NUM_LINES = 600


@pytest.fixture
def fleet(valkey: Valkey, tmp_path: Path) -> Iterator[Fleet]:
    model = write_tiny_model(tmp_path / "tiny")
    with running_fleet(tmp_path / "logs") as fleet:
        common = ["--model", str(model), "--served-model-name", "tiny", "--redis-url", valkey.url]
        fleet.start("gateway", "-m", "gateway", *common, "--port", str(fleet.port))
        start_workers(fleet, common, "w0", "w1")
        yield fleet


@pytest.fixture
async def api(fleet: Fleet) -> AsyncIterator[Api]:
    async with connected(f"http://127.0.0.1:{fleet.port}", "tiny") as api:
        await api.wait_until_ready(fleet, num_workers=2)
        yield api


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


async def test_killed_worker_leaves_one_result_per_line(api: Api, fleet: Fleet, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text("\n".join(batch_lines(NUM_LINES)))
    async with chats(api):
        await run_batch(fleet, tmp_path, kill_midway=True)
    before = (tmp_path / "out.jsonl").read_bytes()
    check_results(before.decode(), NUM_LINES)
    await run_batch(fleet, tmp_path, kill_midway=False)  # no line is left
    assert (tmp_path / "out.jsonl").read_bytes() == before
