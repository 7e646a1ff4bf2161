"""The store dies, forgets, fills up or drops its subscribers under streams. Every stream is complete in the end."""

import asyncio

import pytest

from gateway.store.store_calls import StoreUnavailable
from tests.builders import make_request
from tests.faults.conftest import StartWorld, Store


async def test_killed_store_with_its_file_loses_nothing(start_world: StartWorld, store: Store) -> None:
    """EMIT is repeated with the same step number, so nothing is lost or doubled; new requests are refused meanwhile."""
    world = await start_world()
    world.start_worker("w0", "--script-step-seconds", "0.02")
    readers = world.read(4, max_tokens=150)
    await world.all_have(readers, 20)
    store.kill()
    with pytest.raises(StoreUnavailable):
        await world.client.submission.submit(make_request(5))
    await asyncio.sleep(2)  # length of the fault
    store.start()
    await world.all_complete(readers)
    await world.nothing_is_left()


async def test_empty_store_is_refilled_by_the_gateway(start_world: StartWorld, store: Store) -> None:
    """The gateway returns request and sent tokens to the store; the worker registers again."""
    store.kill()
    store.append_only = False
    store.start()
    world = await start_world()
    world.start_worker("w0", "--script-step-seconds", "0.02")
    readers = world.read(4, max_tokens=150)
    await world.all_have(readers, 20)
    store.kill()
    store.start()
    await world.all_complete(readers)
    assert world.client.counts.num_restored_requests >= len(readers)
    await world.nothing_is_left()


async def test_flushed_store_is_refilled_by_the_gateway(start_world: StartWorld, store: Store) -> None:
    world = await start_world()
    world.start_worker("w0", "--script-step-seconds", "0.02")
    readers = world.read(4, max_tokens=150)
    await world.all_have(readers, 20)
    with store.client() as client:
        client.flushall()
    await world.all_complete(readers)


async def test_dropped_subscribers_read_the_journals(start_world: StartWorld, store: Store) -> None:
    """Pub/sub is only the fast path: what it loses is read from the journals."""
    world = await start_world()
    world.start_worker("w0", "--script-step-seconds", "0.01")
    readers = world.read(4, max_tokens=300)
    await world.all_have(readers, 5)
    with store.client() as client:
        while not all(reader.finished.done() for reader in readers):
            client.client_kill_filter(_type="pubsub")
            await asyncio.sleep(0.2)  # interval between faults
    await world.all_complete(readers)
    assert world.client.counts.num_journal_reads > 0


async def test_full_store_holds_steps_until_there_is_room(start_world: StartWorld, store: Store) -> None:
    """A full store refuses new requests and EMITs; the worker holds its step until there is room."""
    world = await start_world()
    world.start_worker("w0", "--script-step-seconds", "0.02")
    readers = world.read(4, max_tokens=150)
    await world.all_have(readers, 20)
    with store.client() as client:
        client.config_set("maxmemory", "1")
        with pytest.raises(StoreUnavailable):
            await world.client.submission.submit(make_request(5))
        before = [len(reader.tokens) for reader in readers]
        await asyncio.sleep(1.5)  # length of the fault
        client.config_set("maxmemory", "0")
    assert all(len(reader.tokens) < 150 for reader in readers), before
    await world.all_complete(readers)
    await world.nothing_is_left()
