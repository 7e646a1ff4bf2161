"""Cuts, silence, delay and lost replies between the store and one side. Every stream is complete in the end."""

import asyncio
import time

import pytest

from gateway.store.store_calls import StoreUnavailable
from gateway.store.store_probe import PROBE_SECONDS
from shared.new_requests import RetentionTerms
from shared.redis_client import SOCKET_TIMEOUT_SECONDS
from tests.e2e.reader import Reader
from tests.faults.conftest import StartWorld, World
from tests.faults.tcp_proxy import TcpProxy


@pytest.fixture(params=["worker", "client"])
def faulty_side(request: pytest.FixtureRequest) -> str:
    return str(request.param)


async def running(start_world: StartWorld, faulty_side: str) -> tuple[World, list]:  # type: ignore[type-arg]
    world = await start_world(client_through_proxy=faulty_side == "client")
    world.start_worker("w0", "--script-step-seconds", "0.02", through_proxy=faulty_side == "worker")
    readers = world.read(4, max_tokens=150)
    await world.all_have(readers, 20)
    return world, readers


async def test_reset_connections_lose_nothing(start_world: StartWorld, proxy: TcpProxy, faulty_side: str) -> None:
    world, readers = await running(start_world, faulty_side)
    for _ in range(5):
        proxy.cut()
        await asyncio.sleep(0.1)  # interval between faults
    await world.all_complete(readers)
    await world.nothing_is_left()


async def test_network_down_for_three_seconds_loses_nothing(
    start_world: StartWorld, proxy: TcpProxy, faulty_side: str
) -> None:
    world, readers = await running(start_world, faulty_side)
    proxy.is_down = True
    proxy.cut()
    await asyncio.sleep(3)  # length of the fault
    proxy.is_down = False
    await world.all_complete(readers)


async def test_lost_replies_change_nothing(start_world: StartWorld, proxy: TcpProxy, faulty_side: str) -> None:
    """The store has applied what the caller repeats: a repeated script must change nothing."""
    world, readers = await running(start_world, faulty_side)
    for _ in range(8):
        proxy.swallow_replies(1)
        await asyncio.sleep(0.1)  # interval between faults
    await world.all_complete(readers)
    assert proxy.num_swallowed_replies >= 4
    await world.nothing_is_left()


async def test_late_replies_lose_nothing(start_world: StartWorld, proxy: TcpProxy, faulty_side: str) -> None:
    world, readers = await running(start_world, faulty_side)
    proxy.delay_seconds = 0.5
    await asyncio.sleep(3)  # length of the fault
    proxy.delay_seconds = 0.0
    await world.all_complete(readers)


async def test_probe_of_a_silent_store_is_over_before_load_balancers_give_up(
    start_world: StartWorld, proxy: TcpProxy
) -> None:
    world = await start_world(client_through_proxy=True)
    assert await world.client.probe.write_seconds() < PROBE_SECONDS
    proxy.is_silent = True
    began = time.monotonic()
    with pytest.raises(StoreUnavailable):
        await world.client.probe.write_seconds()
    assert time.monotonic() - began < SOCKET_TIMEOUT_SECONDS - 1


async def test_half_open_worker_is_fenced_and_replaced(start_world: StartWorld, proxy: TcpProxy) -> None:
    """Bytes are dropped, connections stay: it fences itself after 10 s; another continues after 15 missed beats."""
    world, readers = await running(start_world, "worker")
    proxy.is_silent = True
    world.start_worker("w1")
    await world.all_complete(readers)
    proxy.is_silent = False
    proxy.cut()
    later = world.read(2, max_tokens=50)
    await world.all_complete(later)
    await world.nothing_is_left()


async def test_kept_request_of_a_cut_off_gateway_is_completed(start_world: StartWorld, proxy: TcpProxy) -> None:
    """Its worker ends it after the grace period, as if nobody read it; its client waits and gets the rest."""
    world = await start_world(client_through_proxy=True)
    world.start_worker("w0", "--script-step-seconds", "0.05")
    reader = Reader(world.client, terms=RetentionTerms(b"record", "h", grace_seconds=2), max_tokens=200)
    await reader.has(20)
    proxy.is_down = True
    proxy.cut()
    await world.logged("w0", "ended: its gateway g0 is gone")
    proxy.is_down = False
    await reader.check_complete()
    # More than one if the gateway submits again before it has subscribed again: it is still gone then.
    assert world.client.counts.num_restored_requests >= 1
    await world.nothing_is_left()
