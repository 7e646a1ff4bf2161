"""Batches of a key that is missing from the keys file use no tokens and wait at least one day for the key."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai

from gateway.batches.driver.driver import WITHDRAWN_SECONDS
from gateway.batches.storage.records import BatchProgress
from tests.gateway.batches.batch_clients import (
    KEYS,
    begun,
    client_of,
    ended,
    folder_of,
    jsonl,
    line,
    results,
    write_keys,
)
from tests.gateway.conftest import Gateway
from tests.gateway.fake_inference import FakeInferenceClient, finish, says


async def progress_when(kept: Path, batch_id: str, holds: Callable[[BatchProgress], bool]) -> BatchProgress:
    folder = folder_of(kept, batch_id)
    while not holds(progress := folder.read_progress()):
        await asyncio.sleep(0.02)  # polls a file of the gateway
    return progress


async def wait_until_released(kept: Path, batch_id: str) -> None:
    """Wait until no gateway drives the batch."""
    folder = folder_of(kept, batch_id)
    while (lease := folder.try_lock()) is None:
        await asyncio.sleep(0.02)
    lease.end()


async def test_briefly_missing_key_uses_nothing_and_continues(
    start_gateway: Callable[..., Any], tmp_path: Path
) -> None:
    keys, kept = write_keys(tmp_path / "keys", *KEYS), tmp_path / "kept"
    gateway: Gateway = await start_gateway(files_dir=kept, api_keys_file=keys, max_batch_concurrency=3)
    async with client_of(gateway, KEYS["team-a"]) as client:
        batch = await begun(client, jsonl(*map(line, "abcd")))
        streams = [await gateway.engine.next_stream() for _ in range(2)]
        streams[0].send(finish(streams[0].request, 0))
        await gateway.engine.next_stream()  # it takes the place of the first line, whose result is written
        write_keys(keys, "team-b")
        assert len({await gateway.engine.next_cancellation(), await gateway.engine.next_cancellation()}) == 2
        await wait_until_released(kept, batch.id)
        progress = await progress_when(kept, batch.id, lambda progress: True)
        assert (progress.status, progress.completed, progress.failed) == ("in_progress", 1, 0)
        gateway.engine.script = says([5])
        write_keys(keys, *KEYS)
        while True:  # until the gateway has read the keys
            try:
                batch = await ended(client, batch)
                break
            except openai.AuthenticationError:
                await asyncio.sleep(0.02)
        assert batch.status == "completed"
        assert set(await results(client, batch.output_file_id)) == set("abcd")


async def test_gateways_without_keys_cancel_no_batches(start_gateway: Callable[..., Any], tmp_path: Path) -> None:
    keys, kept = write_keys(tmp_path / "keys", *KEYS), tmp_path / "kept"
    first: Gateway = await start_gateway(files_dir=kept, api_keys_file=keys)
    async with client_of(first, KEYS["team-a"]) as client:
        batch = await begun(client, jsonl(*map(line, "ab")))
        await first.engine.next_stream()
        await first.driver.stop()
    await wait_until_released(kept, batch.id)
    without: Gateway = await start_gateway(FakeInferenceClient(says([5])), files_dir=kept)
    async with client_of(without) as keyless:
        own = await ended(keyless, await begun(keyless, jsonl(line("x"))))  # proof that it has checked all batches
        assert own.status == "completed"
    progress = await progress_when(kept, batch.id, lambda progress: True)
    assert (progress.status, progress.failed, len(without.engine.requests)) == ("in_progress", 0, 1)
    second: Gateway = await start_gateway(FakeInferenceClient(says([5])), files_dir=kept, api_keys_file=keys)
    async with client_of(second, KEYS["team-a"]) as client:
        batch = await ended(client, batch)
        assert set(await results(client, batch.output_file_id)) == {"a", "b"}


async def test_key_missing_for_a_day_has_its_batches_cancelled(
    start_gateway: Callable[..., Any], tmp_path: Path
) -> None:
    keys, kept = write_keys(tmp_path / "keys", *KEYS), tmp_path / "kept"
    gateway: Gateway = await start_gateway(files_dir=kept, api_keys_file=keys)
    async with client_of(gateway, KEYS["team-a"]) as client:
        batch = await begun(client, jsonl(*map(line, "ab")))
        await gateway.engine.next_stream()
        write_keys(keys, "team-b")
    mark = kept / "batches" / batch.id / "unknown-since"
    while not mark.exists():
        await asyncio.sleep(0.02)
    mark.write_text(str(int(time.time() - WITHDRAWN_SECONDS - 1)))
    progress = await progress_when(kept, batch.id, lambda progress: progress.has_ended)
    assert (progress.status, progress.failed) == ("cancelled", 2)
