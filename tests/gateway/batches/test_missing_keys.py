"""A key that is missing spends nothing, and loses nothing: its batches wait for it, a day at least."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai

from gateway.batches.records import BatchProgress
from gateway.batches.service import WITHDRAWN_SECONDS
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


async def let_go(kept: Path, batch_id: str) -> None:
    """Until no gateway drives it."""
    folder = folder_of(kept, batch_id)
    while (lease := folder.try_lock()) is None:
        await asyncio.sleep(0.02)
    lease.end()


async def test_a_key_that_is_missing_for_a_moment_spends_nothing_and_goes_on(
    start_gateway: Callable[..., Any], tmp_path: Path
) -> None:
    keys, kept = write_keys(tmp_path / "keys", *KEYS), tmp_path / "kept"
    gateway: Gateway = await start_gateway(files_dir=kept, api_keys_file=keys, max_batch_concurrency=3)
    async with client_of(gateway, KEYS["team-a"]) as client:
        batch = await begun(client, jsonl(*map(line, "abcd")))
        streams = [await gateway.engine.next_stream() for _ in range(2)]
        streams[0].send(finish(streams[0].request, 0))
        await gateway.engine.next_stream()  # in its place, so its result is there
        write_keys(keys, "team-b")
        assert len({await gateway.engine.next_cancellation(), await gateway.engine.next_cancellation()}) == 2
        await let_go(kept, batch.id)
        progress = await progress_when(kept, batch.id, lambda progress: True)
        assert (progress.status, progress.completed, progress.failed) == ("in_progress", 1, 0)
        gateway.engine.script = says([5])
        write_keys(keys, *KEYS)
        while True:  # until the gateway has read them
            try:
                batch = await ended(client, batch)
                break
            except openai.AuthenticationError:
                await asyncio.sleep(0.02)
        assert batch.status == "completed"
        assert set(await results(client, batch.output_file_id)) == set("abcd")


async def test_gateways_that_lost_their_keys_cancel_nothing(start_gateway: Callable[..., Any], tmp_path: Path) -> None:
    keys, kept = write_keys(tmp_path / "keys", *KEYS), tmp_path / "kept"
    first: Gateway = await start_gateway(files_dir=kept, api_keys_file=keys)
    async with client_of(first, KEYS["team-a"]) as client:
        batch = await begun(client, jsonl(*map(line, "ab")))
        await first.engine.next_stream()
        first.state.open_requests.draining = True
    await let_go(kept, batch.id)
    without: Gateway = await start_gateway(FakeInferenceClient(says([5])), files_dir=kept)
    async with client_of(without) as nobody:
        own = await ended(nobody, await begun(nobody, jsonl(line("x"))))  # so it has looked at all of them
        assert own.status == "completed"
    progress = await progress_when(kept, batch.id, lambda progress: True)
    assert (progress.status, progress.failed, len(without.engine.requests)) == ("in_progress", 0, 1)
    second: Gateway = await start_gateway(FakeInferenceClient(says([5])), files_dir=kept, api_keys_file=keys)
    async with client_of(second, KEYS["team-a"]) as client:
        batch = await ended(client, batch)
        assert set(await results(client, batch.output_file_id)) == {"a", "b"}


async def test_a_key_that_stays_away_for_a_day_is_withdrawn(start_gateway: Callable[..., Any], tmp_path: Path) -> None:
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
