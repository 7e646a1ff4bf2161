"""An idle worker waits for a message from gateways that send one, and in a blocking read for others."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from engine_worker.transport.control_messages import ControlMessages
from engine_worker.transport.request_stream import RequestStream
from engine_worker.transport.worker_profile import WorkerProfile
from shared.messages import encode
from shared.new_requests import NewRequest, Share
from shared.redis_client import RedisConnections
from shared.redis_scripts import Demand
from shared.tasks import cancel_and_wait
from tests.engine_worker.transport.rig import WORKER, Rig, make_request

TIMEOUT_SECONDS = 10.0  # of a claim that only a message can end


@pytest.fixture(autouse=True)
def no_ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    """No claim ends at a tick."""
    monkeypatch.setattr("engine_worker.transport.request_stream.BLOCK_SECONDS", 600.0)


@asynccontextmanager
async def listening(rig: Rig, connections: RedisConnections) -> AsyncIterator[None]:
    def ignore(request_id: str) -> None:
        pass

    messages = ControlMessages(connections.subscriber, rig.keys, ignore, on_wake=rig.requests.wakes.wake)
    task = asyncio.create_task(messages.run(WORKER))
    try:
        while not (await rig.redis.pubsub_numsub(rig.keys.control_channel(WORKER)))[0][1]:
            await asyncio.sleep(0)
        yield
    finally:
        await cancel_and_wait([task])


async def accept_as_old_gateway(rig: Rig, request_id: str) -> None:
    """Accept a request whose entry shows that nobody was woken."""
    await rig.accept(request_id)
    queue = rig.keys.queue("interactive")
    found: Any = await rig.redis.xrevrange(queue, count=1)
    await rig.redis.xdel(queue, found[0][0])
    fields = {name: value for name, value in found[0][1].items() if name != b"h"}
    again = await rig.redis.xadd(queue, fields)
    await rig.redis.hset(rig.keys.request(request_id), "entry", again)


async def test_claim_is_woken_without_a_blocking_read(rig, connections):
    async with listening(rig, connections):
        await rig.accept("first")
        assert await rig.claim() == ["first"]  # and the worker has room
        rig.requests.wakes.wake()
        waiting = asyncio.create_task(rig.requests.claim(Demand(4), block=True))
        await rig.accept("a")
        async with asyncio.timeout(TIMEOUT_SECONDS):
            claimed = [one.request.request_id for one in await waiting]
        assert (claimed or await rig.claim()) == ["a"]


async def test_claim_after_one_that_found_everything_costs_nothing_until_a_message(rig, connections):
    async with listening(rig, connections):
        rig.requests.wakes.wake()
        assert await rig.claim() == []
        num_calls = len(rig.scripts.calls)
        waiting = asyncio.create_task(rig.requests.claim(Demand(4), block=True))
        await rig.accept("a")
        assert await waiting == []
        assert rig.scripts.calls[num_calls:] == ["accept"]
        assert await rig.claim() == ["a"]


async def test_entry_of_an_old_gateway_ends_the_wait_for_messages(rig):
    rig.requests.wakes.wake()
    await rig.accept("new")
    assert await rig.claim() == ["new"]
    assert rig.requests.wakes.are_sent
    await accept_as_old_gateway(rig, "old")
    assert await rig.claim() == ["old"]
    assert not rig.requests.wakes.are_sent
    waiting = asyncio.create_task(rig.requests.claim(Demand(4), block=True))
    while not (await rig.redis.info("clients"))["blocked_clients"]:
        await asyncio.sleep(0)
    await accept_as_old_gateway(rig, "next")
    assert [claimed.request.request_id for claimed in await waiting] == ["next"]


async def test_requeued_entry_says_nothing_about_gateways(rig):
    await rig.accept("a")
    assert await rig.claim() == ["a"]
    rig.requests.wakes.wake()
    await rig.requests.unclaim(["a"])
    assert await rig.claim() == ["a"]
    assert rig.requests.wakes.are_sent


async def test_worker_without_peers_waits_in_a_blocking_read(rig, connections):
    """Its gateways may send no messages then."""
    alone = WorkerProfile(has_peers=lambda: False)
    rig.requests = RequestStream(connections, rig.scripts, WORKER, rig.claims, rig.clock, profile=alone)
    rig.requests.wakes.wake()
    waiting = asyncio.create_task(rig.requests.claim(Demand(4), block=True))
    while not (await rig.redis.info("clients"))["blocked_clients"]:
        await asyncio.sleep(0)
    await rig.accept("a", wakes=False)
    assert [claimed.request.request_id for claimed in await waiting] == ["a"]


async def test_worker_without_peers_becomes_the_home_of_what_it_claims(rig, connections):
    """So conversations stay with it when a second worker joins."""
    rig.requests = RequestStream(
        connections, rig.scripts, WORKER, rig.claims, rig.clock, profile=WorkerProfile(has_peers=lambda: False)
    )
    waiting = asyncio.create_task(rig.requests.claim(Demand(4), block=True))
    while not (await rig.redis.info("clients"))["blocked_clients"]:
        await asyncio.sleep(0)
    await accept_with_prefix(rig, "a")
    await waiting
    assert [home.split()[1] for home in await rig.redis.hvals(rig.scripts.keys.homes)] == [WORKER.encode()]


async def test_request_of_a_silent_home_waits_only_shortly(rig, connections):
    """Its home is stopped and still counts as a worker with room; a peer is woken too, and takes the request."""
    await rig.scripts.register("silent.1")
    await accept_with_prefix(rig, "first")
    (entry,) = (await rig.scripts.take("silent.1", Demand(1, room=9))).entries
    await rig.scripts.claim("silent.1", [entry])
    async with listening(rig, connections):
        rig.requests.wakes.wake()
        assert await rig.claim() == []
        waiting = asyncio.create_task(claim_any(rig))
        async with asyncio.timeout(TIMEOUT_SECONDS):
            await accept_with_prefix(rig, "next")
            assert await waiting == ["next"]


async def accept_with_prefix(rig: Rig, request_id: str) -> None:
    new = NewRequest(request_id, encode(make_request(request_id)), prefix_key=b"p" * 8)
    await rig.scripts.accept_all([new], gateway_id="g", priority_class="interactive", share=Share(""))


async def claim_any(rig: Rig) -> list[str]:
    while not (claimed := await rig.requests.claim(Demand(4), block=True)):
        pass
    return [one.request.request_id for one in claimed]
