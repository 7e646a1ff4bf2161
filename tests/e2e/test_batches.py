"""/v1/batches: 600 lines beside chats, while the driver that runs them and a worker are killed."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.conftest import Valkey
from tests.e2e.batch_load import NUM_LINES, begun, chats, check_results, client_at, start_driver, start_workers
from tests.e2e.fleet import Api, Fleet, connected, running_fleet
from tests.tiny_model import write_tiny_model

pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def fleet(valkey: Valkey, tmp_path: Path) -> Iterator[Fleet]:
    model = write_tiny_model(tmp_path / "tiny")
    with running_fleet(tmp_path / "logs") as fleet:
        common = ["--model", str(model), "--served-model-name", "tiny", "--redis-url", valkey.url]
        files = ["--files-dir", str(tmp_path / "files")]
        fleet.start("gateway", "-m", "gateway", *common, *files, "--port", str(fleet.port))
        start_driver(fleet, "first", *common, *files)
        start_workers(fleet, common, "w0", "w1")
        yield fleet


@pytest.fixture
async def api(fleet: Fleet) -> AsyncIterator[Api]:
    async with connected(f"http://127.0.0.1:{fleet.port}", "tiny") as api:
        await api.wait_until_ready(fleet, num_workers=2)
        yield api


async def test_killed_driver_and_worker_leave_one_result_per_line(
    api: Api, fleet: Fleet, valkey: Valkey, tmp_path: Path
) -> None:
    common = ["--model", str(tmp_path / "tiny"), "--served-model-name", "tiny", "--redis-url", valkey.url]
    async with chats(api), client_at(fleet.port) as client:
        batch = await begun(client)
        written = tmp_path / "files" / "batches" / batch.id / "output.jsonl"
        for name, num_results in (("first", NUM_LINES // 3), ("w0", 2 * NUM_LINES // 3)):
            while not written.exists() or written.read_bytes().count(b"\n") < num_results:
                assert (await client.batches.retrieve(batch.id)).status in ("validating", "in_progress")
                await asyncio.sleep(0.02)  # polls a file of another process
            fleet.processes[name].kill()
            if name == "first":
                start_driver(fleet, "second", *common, "--files-dir", str(tmp_path / "files"))
        while batch.status != "completed":
            assert batch.status in ("validating", "in_progress", "finalizing"), fleet.all_logs()
            await asyncio.sleep(0.05)  # polls as a client does
            batch = await client.batches.retrieve(batch.id)
        assert batch.output_file_id is not None and batch.error_file_id is None
        check_results((await client.files.content(batch.output_file_id)).text)
