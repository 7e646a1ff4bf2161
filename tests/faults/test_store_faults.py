"""The store dies, forgets, fills up or drops its listeners while streams run. Every stream is whole in the end."""

import asyncio

import pytest

from gateway.store.inference_client import StoreUnavailable
from tests.builders import make_request
from tests.faults.conftest import StartWorld, Store


async def test_killed_and_restarted_with_its_file(start_world: StartWorld, store: Store) -> None:
    """EMITs are repeated with the same step, so nothing is lost or doubled; meanwhile new requests are refused."""
    world = await start_world()
    world.start_worker("w0", "--script-step-seconds", "0.02")
    readers = world.read(4, max_tokens=150)
    await world.all_have(readers, 20)
    store.kill()
    with pytest.raises(StoreUnavailable):
        await world.client.submission.submit(make_request(5))
    await asyncio.sleep(2)  # the fault's length
    store.start()
    await world.all_complete(readers)
    await world.nothing_is_left()


async def test_restarted_empty(start_world: StartWorld, store: Store) -> None:
    """The gateway gives the store back what it lost: request and tokens sent; the worker registers anew."""
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


async def test_flushed_under_everybody(start_world: StartWorld, store: Store) -> None:
    world = await start_world()
    world.start_worker("w0", "--script-step-seconds", "0.02")
    readers = world.read(4, max_tokens=150)
    await world.all_have(readers, 20)
    with store.client() as client:
        client.flushall()
    await world.all_complete(readers)


async def test_listeners_are_dropped_again_and_again(start_world: StartWorld, store: Store) -> None:
    """Pub/sub is the fast path only: what it loses is read from the journals."""
    world = await start_world()
    world.start_worker("w0", "--script-step-seconds", "0.01")
    readers = world.read(4, max_tokens=300)
    await world.all_have(readers, 5)
    with store.client() as client:
        while not all(reader.finished.done() for reader in readers):
            client.client_kill_filter(_type="pubsub")
            await asyncio.sleep(0.2)  # the fault's rhythm
    await world.all_complete(readers)
    assert world.client.counts.num_journal_reads > 0


async def test_out_of_memory_and_relieved(start_world: StartWorld, store: Store) -> None:
    """A full store refuses new requests and EMITs alike; the worker holds its step until there is room again."""
    world = await start_world()
    world.start_worker("w0", "--script-step-seconds", "0.02")
    readers = world.read(4, max_tokens=150)
    await world.all_have(readers, 20)
    with store.client() as client:
        client.config_set("maxmemory", "1")
        with pytest.raises(StoreUnavailable):
            await world.client.submission.submit(make_request(5))
        before = [len(reader.tokens) for reader in readers]
        await asyncio.sleep(1.5)  # the fault's length
        client.config_set("maxmemory", "0")
    assert all(len(reader.tokens) < 150 for reader in readers), before
    await world.all_complete(readers)
    await world.nothing_is_left()
