"""A request prefers the worker that last claimed one with its prefix, and waits for no one (homes.lua, order.lua)."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from random import Random
from typing import Any

import pytest
from redis.asyncio import Redis

from shared.new_requests import NewRequest, Share
from shared.reaping import reap_worker
from shared.redis_client import RedisConnections
from shared.redis_keys import INTERACTIVE, RedisKeys
from shared.redis_scripts import Demand, QueueEntry, RedisScripts, Taken
from shared.subscription import GAP, Message, Subscription

A, B = "a.1", "b.1"
PREFIX, OTHER = b"p" * 8, b"q" * 8
NUM_SLOTS = 32768  # of homes.lua
LATER_SECONDS = 5.0  # far more than the 20 ms for which an entry is left to its home


@pytest.fixture
def redis(connections: RedisConnections) -> Redis:
    return connections.commands


@pytest.fixture
async def store(scripts: RedisScripts) -> RedisScripts:
    for worker_id in (A, B):
        await scripts.register(worker_id)
        await take(scripts, worker_id)
    return scripts


async def accept(
    scripts: RedisScripts, *request_ids: str, prefix: bytes = PREFIX, tokens: int = 100, key: str = ""
) -> None:
    requests = [
        NewRequest(request_id, b"body", num_prompt_tokens=tokens, prefix_key=prefix) for request_id in request_ids
    ]
    await scripts.accept_all(requests, gateway_id="g", priority_class=INTERACTIVE, share=Share(key))


async def take(
    scripts: RedisScripts, worker_id: str, count: int = 1, *, num_held: int = 0, room: int | None = None
) -> Taken:
    return await scripts.take(worker_id, Demand(count, room=room), num_held=num_held)


async def names(
    scripts: RedisScripts, worker_id: str, count: int = 1, *, num_held: int = 0, room: int | None = None
) -> list[str]:
    taken = await take(scripts, worker_id, count, num_held=num_held, room=room)
    return [entry.request_id for entry in taken.entries]


async def settle_at(scripts: RedisScripts, worker_id: str, prefix: bytes = PREFIX) -> None:
    """Let a worker with free slots become the home of a prefix."""
    await accept(scripts, f"first-{worker_id}-{prefix.hex()}", prefix=prefix)
    (entry,) = (await take(scripts, worker_id, room=9)).entries
    await scripts.claim(worker_id, [entry])


async def later(scripts: RedisScripts, worker_id: str) -> list[QueueEntry]:
    """Take until an entry is no longer left to its home."""
    async with asyncio.timeout(LATER_SECONDS):
        while not (found := (await take(scripts, worker_id, room=9)).entries):
            pass
    return found


@asynccontextmanager
async def wakes(connections: RedisConnections, keys: RedisKeys, *worker_ids: str) -> AsyncIterator[asyncio.Queue[str]]:
    """Collect the ids of woken workers."""
    prefix, woken, listens = keys.control_channel_prefix, asyncio.Queue[str](), asyncio.Event()
    subscription = Subscription(connections.subscriber, [prefix + worker_id for worker_id in worker_ids])

    async def listen() -> None:
        while True:
            message = await subscription.get(1.0)
            if message is GAP:
                listens.set()
            elif isinstance(message, Message) and message.data == b"":
                woken.put_nowait(message.channel.removeprefix(prefix))

    task = asyncio.create_task(listen())
    try:
        await listens.wait()
        yield woken
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await subscription.aclose()


class TestOrder:
    async def test_home_reads_its_entries_first(self, store: RedisScripts) -> None:
        await settle_at(store, A)
        await accept(store, "old", prefix=OTHER)
        await accept(store, "own")
        assert await names(store, A) == ["own"]
        assert await names(store, A) == ["old"]

    async def test_other_worker_leaves_an_entry_for_a_short_time(self, store: RedisScripts) -> None:
        async with asyncio.timeout(LATER_SECONDS):
            for number in count():  # a busy machine may need longer than that between the two calls
                prefix = number.to_bytes(8, "big")
                await settle_at(store, A, prefix)
                await accept(store, f"own{number}", prefix=prefix)
                taken = await take(store, B)
                if not taken.entries:
                    break
        assert taken.others_wait
        assert [entry.request_id for entry in await later(store, B)] == [f"own{number}"]

    async def test_entry_with_a_long_prompt_is_left_longer(self, store: RedisScripts) -> None:
        """For about as long as computing it again takes: 10,000 tokens for 250 ms."""
        await settle_at(store, A)
        await accept(store, "own", tokens=10_000)
        (entry,) = await later(store, B)
        accepted_ms = entry.queued_ms
        seconds, microseconds = await store.redis.time()
        assert seconds * 1000 + microseconds / 1000 - accepted_ms >= 250

    async def test_worker_that_claimed_a_request_is_the_next_home(
        self, store: RedisScripts, redis: Redis, keys: RedisKeys
    ) -> None:
        await settle_at(store, A)
        await accept(store, "own")
        await store.claim(B, await later(store, B))
        values: Any = await redis.hvals(keys.homes)
        assert values == [f"{PREFIX.hex()} {B}".encode()]

    @pytest.mark.parametrize("reason", ["full", "busy", "reaped"])
    async def test_entry_of_home_that_cannot_take_it_waits_for_nobody(self, store: RedisScripts, reason: str) -> None:
        await settle_at(store, A)
        await accept(store, "own")
        if reason == "full":
            await take(store, A, 0, num_held=3, room=0)
        elif reason == "busy":
            await take(store, A, 0, num_held=6, room=9)  # six more than B
        else:
            await reap_worker(store, A)
        assert "own" in await names(store, B, 9)

    async def test_home_may_hold_more_than_its_peers_of_its_own_entries(self, store: RedisScripts) -> None:
        """Beside an idle peer, a worker takes two requests, or six whose prefixes it has."""
        await settle_at(store, A)
        await accept(store, *(f"own{number}" for number in range(9)))
        assert len(await names(store, A, 9, room=9)) == 6
        await accept(store, *(f"new{number}" for number in range(9)), prefix=b"")
        assert await names(store, A, 9, num_held=6, room=9) == []

    async def test_key_waits_at_most_for_the_window(self, store: RedisScripts) -> None:
        """Entries of a home precede those of another key by at most 16,384 tokens."""
        await settle_at(store, A)
        await take(store, B, 0, num_held=100, room=0)
        await accept(store, "b0", prefix=OTHER, key="b")
        await accept(store, *(f"own{number}" for number in range(40)), tokens=1_000, key="a")
        order = [(await names(store, A, num_held=number, room=99))[0] for number in range(20)]
        assert 10 <= order.index("b0") <= 16

    async def test_cancelled_entries_do_not_stop_a_home(
        self, store: RedisScripts, redis: Redis, keys: RedisKeys
    ) -> None:
        await settle_at(store, A)
        await accept(store, "other", prefix=OTHER, key="b")
        await accept(store, *(f"own{number}" for number in range(3)), key="a")
        await store.cancel("own0", INTERACTIVE)
        assert await names(store, A) == ["own1"]
        assert await redis.zcard(f"{keys.turns(INTERACTIVE)[0]}:{A}") == 1, "own2"

    @pytest.mark.parametrize("seed", range(10))
    async def test_one_call_reads_in_the_order_of_many(self, store: RedisScripts, redis: Redis, seed: int) -> None:
        """Of several keys and homes, some cancelled, and more than a page of the set of a home."""
        found = []
        for each in (1, 7, 25, 60):
            await redis.flushall()
            await store.register(A)
            await settle_at(store, A)
            random = Random(seed)
            for number in range(60):
                prefix, key = random.choice([PREFIX, OTHER]), random.choice("abc")
                await accept(store, f"{key}{number}", prefix=prefix, tokens=random.randrange(3_000), key=key)
            for number in random.sample(range(60), 12):
                for key in "abc":
                    await store.cancel(f"{key}{number}", INTERACTIVE)
            calls = [await names(store, A, each, room=99) for _ in range(0, 60, each)]
            found.append([name for call in calls for name in call])
        assert len(found[0]) == 48
        assert found[1:] == found[:1] * 3

    async def test_queue_without_entries_leaves_nothing_but_the_table(
        self, store: RedisScripts, redis: Redis, keys: RedisKeys
    ) -> None:
        await settle_at(store, A)
        await accept(store, "own0", "own1")
        await take(store, A, 9, room=9)
        await take(store, A, 9, room=9)
        order, times = keys.turns(INTERACTIVE)
        assert not await redis.exists(order, times, f"{order}:{A}")
        assert await redis.hlen(keys.homes) == 1

    async def test_entries_of_a_home_expire_with_it(self, store: RedisScripts, redis: Redis, keys: RedisKeys) -> None:
        """They may be cancelled after the home has gone, which nobody would notice."""
        await settle_at(store, A)
        await reap_worker(store, A)
        await accept(store, "own")
        assert 0 < await redis.ttl(f"{keys.turns(INTERACTIVE)[0]}:{A}") <= 3600

    async def test_table_of_homes_is_bounded(self, store: RedisScripts, redis: Redis, keys: RedisKeys) -> None:
        await take(store, B, 0, room=0)
        for number in range(50):
            prefixes = [(number * 2_000 + position).to_bytes(4, "big") * 2 for position in range(2_000)]
            requests = [NewRequest(f"{number}-{key.hex()}", b"", prefix_key=key) for key in prefixes]
            await store.accept_all(requests, gateway_id="g", priority_class=INTERACTIVE, share=Share(""))
            entries = (await take(store, A, 2_000, room=9)).entries
            assert all(await store.claim(A, entries))
        assert await redis.hlen(keys.homes) == NUM_SLOTS


class TestWakes:
    async def test_request_wakes_its_home_and_one_more(
        self, store: RedisScripts, connections: RedisConnections, keys: RedisKeys
    ) -> None:
        await store.register("c.1")
        await take(store, "c.1")
        await settle_at(store, B)
        async with wakes(connections, keys, A, B, "c.1") as woken:
            await accept(store, "own")
            assert [await woken.get(), await woken.get()] == [B, A]
            await accept(store, "last", prefix=b"")
            assert [await woken.get(), await woken.get()] == [A, "c.1"]  # no third message before

    async def test_requests_without_home_wake_the_least_loaded_and_one_more(
        self, store: RedisScripts, connections: RedisConnections, keys: RedisKeys
    ) -> None:
        await take(store, A, 0, num_held=3, room=9)
        async with wakes(connections, keys, A, B) as woken:
            await accept(store, "x", prefix=b"")
            assert [await woken.get(), await woken.get()] == [B, A]

    @pytest.mark.parametrize("count", [1, 3])
    async def test_take_that_leaves_entries_wakes_a_peer(
        self, store: RedisScripts, connections: RedisConnections, keys: RedisKeys, count: int
    ) -> None:
        """It may read three, but only two more than the peer holds."""
        await accept(store, "x", "y", "z", prefix=b"")
        async with wakes(connections, keys, B) as woken:
            assert len(await names(store, A, count, room=9)) == min(count, 2)
            assert await woken.get() == B

    async def test_requests_of_a_dead_worker_wake_a_peer(
        self, store: RedisScripts, connections: RedisConnections, keys: RedisKeys
    ) -> None:
        await settle_at(store, A)
        async with wakes(connections, keys, B) as woken:
            await reap_worker(store, A)
            assert await woken.get() == B

    async def test_returned_requests_wake_a_peer(
        self, store: RedisScripts, connections: RedisConnections, keys: RedisKeys
    ) -> None:
        await accept(store, "x")
        entries = (await take(store, A)).entries
        async with wakes(connections, keys, A, B) as woken:
            await store.unclaim(A, entries)
            assert await woken.get() == B  # the least loaded first
