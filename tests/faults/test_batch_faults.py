"""The store dies, with or without its data, while a batch runs: each line has exactly one correct result."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.e2e.batch_load import WORKER_FLAGS, begun, check_results, client_at, start_driver
from tests.faults.site import Site, running_site
from tests.tiny_model import write_tiny_model

pytestmark = pytest.mark.timeout(600)
NUM_LINES = 300
SILENCE_SECONDS = 1.0  # port of the store


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    files = ["--files-dir", str(tmp_path / "files")]
    flags = [*WORKER_FLAGS, "--script-step-seconds", "0.02"]
    model = write_tiny_model(tmp_path / "tiny")
    async with running_site(
        tmp_path, model, name="tiny", num_workers=1, worker_flags=flags, gateway_flags=files
    ) as site:
        common = ["--model", str(model), "--served-model-name", "tiny", "--redis-url", site.store.url]
        start_driver(site.fleet, "d0", *common, *files)
        yield site


@pytest.mark.parametrize("append_only", [True, False], ids=["with its file", "empty"])
async def test_store_crash_leaves_one_result_per_batch_line(site: Site, tmp_path: Path, append_only: bool) -> None:
    if not append_only:
        site.store.stop()
        site.store.append_only = False
        site.store.start()
        await site.ready(num_workers=1)
    async with client_at(site.ports["g0"]) as client:
        batch = await begun(client, NUM_LINES)
        written = tmp_path / "files" / "batches" / batch.id / "output.jsonl"
        while not written.exists() or written.read_bytes().count(b"\n") < NUM_LINES // 3:
            await asyncio.sleep(0.01)  # polls a file of another process
        site.store.kill()
        await asyncio.sleep(SILENCE_SECONDS)  # length of the fault
        assert (await client.batches.retrieve(batch.id)).status == "in_progress"
        site.store.start()
        while batch.status != "completed":
            assert batch.status in ("validating", "in_progress", "finalizing"), site.fleet.all_logs()
            await asyncio.sleep(0.05)  # polls as a client does
            batch = await client.batches.retrieve(batch.id)
        assert batch.output_file_id is not None and batch.error_file_id is None
        check_results((await client.files.content(batch.output_file_id)).text, NUM_LINES)
    await site.nothing_is_left()
