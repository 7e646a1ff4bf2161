"""A batch that repeatedly kills its gateway fails, so that it does not kill the next one."""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gateway.batches.driver import batch_run
from gateway.batches.driver.batch_run import GATEWAY_STOPPED, MAX_CRASHES
from gateway.batches.storage.batch_store import BatchFolder
from gateway.batches.storage.records import BatchProgress
from tests.gateway.batches.batch_clients import (
    ENDPOINT,
    begun,
    client_of,
    ended,
    folder_of,
    jsonl,
    line,
    results,
    storage_of,
)
from tests.gateway.conftest import Gateway
from tests.gateway.fake_inference import FakeInferenceClient, says


def stored(kept: Path, tmp_path: Path, progress: BatchProgress, num_killed: int) -> BatchFolder:
    """Store a batch that was held by `strikes` killed gateways."""
    (tmp_path / "in").write_bytes(jsonl(*map(line, "ab")))
    storage = storage_of(kept)
    folder = storage.batches.create("", ENDPOINT, "file-" + "0" * 32, tmp_path / "in", "24h", None)
    storage.close()
    folder.write_progress(progress)
    for _ in range(num_killed):
        lease = folder.try_lock()
        assert lease is not None
        os.close(lease._descriptor)  # as the kernel does for a killed process
    return folder


@pytest.mark.parametrize(
    ("num_killed", "status"), [(0, "completed"), (MAX_CRASHES - 1, "completed"), (MAX_CRASHES, "failed")]
)
async def test_batch_whose_check_kills_gateways_fails(
    start_gateway: Callable[..., Any], tmp_path: Path, num_killed: int, status: str
) -> None:
    folder = stored(tmp_path / "kept", tmp_path, BatchProgress(), num_killed)
    gateway: Gateway = await start_gateway(FakeInferenceClient(says([5])), files_dir=tmp_path / "kept")
    async with client_of(gateway) as client:
        batch = await ended(client, await client.batches.retrieve(folder.record.id))
        assert batch.status == status
        codes = [problem.code for problem in (batch.errors.data or [] if batch.errors else [])]
        assert codes == ([GATEWAY_STOPPED] if status == "failed" else [])
        assert bool(gateway.engine.requests) == (status == "completed")


async def test_lines_that_kill_gateways_get_one_result_each(start_gateway: Callable[..., Any], tmp_path: Path) -> None:
    progress = BatchProgress(status="in_progress", total=2)
    folder = stored(tmp_path / "kept", tmp_path, progress, MAX_CRASHES)
    gateway: Gateway = await start_gateway(FakeInferenceClient(says([5])), files_dir=tmp_path / "kept")
    async with client_of(gateway) as client:
        batch = await ended(client, await client.batches.retrieve(folder.record.id))
        errors = await results(client, batch.error_file_id)
        assert set(errors) == {"a", "b"} and {error["error"]["code"] for error in errors.values()} == {GATEWAY_STOPPED}
        assert gateway.engine.requests == []


async def test_clean_end_or_steady_run_counts_no_crash(
    start_gateway: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_run, "STEADY_SECONDS", 0.0)
    gateway: Gateway = await start_gateway(files_dir=tmp_path)
    async with client_of(gateway) as client:
        batch = await begun(client, jsonl(line("a")))
        await gateway.engine.next_stream()
        lock = tmp_path / "batches" / batch.id / "lock"
        while lock.read_bytes() != b"%08d" % 0:  # a steady run
            await asyncio.sleep(0.02)
    await gateway.driver.stop()
    folder = folder_of(tmp_path, batch.id)
    for _ in range(MAX_CRASHES + 1):  # gateways that release the batch
        while (lease := folder.try_lock()) is None:
            await asyncio.sleep(0.02)
        assert lease.num_crashes == 0
        lease.end()


async def test_every_result_has_an_id_of_its_own(start_gateway: Callable[..., Any], tmp_path: Path) -> None:
    """This includes lines that were refused, or cancelled before they were sent."""
    gateway: Gateway = await start_gateway(FakeInferenceClient(says([5])), files_dir=tmp_path)
    async with client_of(gateway) as client:
        bad = [line(f"bad{number}", temperature=9) for number in range(3)]
        batch = await ended(client, await begun(client, jsonl(*bad, *map(line, "ab"))))
        refused = (await results(client, batch.error_file_id)).values()
        found = [*refused, *(await results(client, batch.output_file_id)).values()]
        gateway.engine.script = None
        cancelled = await begun(client, jsonl(*map(line, "cd")))
        await gateway.engine.next_stream()
        await client.batches.cancel(cancelled.id)
        cancelled = await ended(client, cancelled)
        found += (await results(client, cancelled.error_file_id)).values()
    ids = [one["id"] for one in found]
    assert len(set(ids)) == 7 and all(one.startswith("batch_req_") and len(one) == 42 for one in ids)
    request_ids = [one["response"]["request_id"] for one in found if one["response"]]
    assert len(set(request_ids)) == 5 and all(request_ids)
