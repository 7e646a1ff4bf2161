"""Requests of several keys are read in turns, independent of how many one of them has queued (order.lua)."""

import random
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
from redis.asyncio import Redis

from shared.new_requests import NewRequest, Share
from shared.reaping import reap_worker
from shared.redis_client import RedisConnections
from shared.redis_keys import GROUP, RESUMED, RedisKeys
from shared.redis_scripts import (
    PLACE_TOKENS,
    Demand,
    Ending,
    QueueEntry,
    ReapMode,
    RedisScripts,
    queue_entry,
)

WORKER = "w.1"
TOKENS = 100


@pytest.fixture
def redis(connections: RedisConnections) -> Redis:
    return connections.commands


@pytest.fixture
async def store(scripts: RedisScripts) -> RedisScripts:
    await scripts.register(WORKER)
    return scripts


async def accept(
    scripts: RedisScripts, *request_ids: str, tokens: int = TOKENS, priority_class: str = "interactive"
) -> None:
    """Accept requests of one body, for the key that is their first letter."""
    requests = [NewRequest(request_id, b"body", num_prompt_tokens=tokens) for request_id in request_ids]
    await scripts.accept_all(requests, gateway_id="g", priority_class=priority_class, share=Share(request_ids[0][0]))


async def take(scripts: RedisScripts, count: int = 1) -> list[QueueEntry]:
    return (await scripts.take(WORKER, Demand(count))).entries


async def order(scripts: RedisScripts, count: int, each: int = 1) -> list[str]:
    return [entry.request_id for _ in range(0, count, each) for entry in await take(scripts, each)]


@pytest.mark.parametrize("each", [1, 3, 100])
async def test_turns_key_does_not_wait_for_backlog_of_another(store: RedisScripts, each: int) -> None:
    await accept(store, *[f"h{number}" for number in range(50)])
    await accept(store, "p0")
    await accept(store, "p1")
    found = await order(store, 99, each)
    assert sorted(found[1:4]) == ["h1", "p0", "p1"] or sorted(found[:3]) == ["h0", "h1", "p0"]
    assert set(found) == {"p0", "p1", *[f"h{number}" for number in range(50)]}
    for key in "hp":  # each key's requests keep their order
        numbers = [int(name[1:]) for name in found if name[0] == key]
        assert all(a < b for a, b in pairwise(numbers))


async def test_turns_are_divided_by_cost(store: RedisScripts) -> None:
    """A prompt of 1,152 tokens costs as much as ten empty ones, because a queue place costs PLACE_TOKENS."""
    await accept(store, *[f"h{number}" for number in range(20)], tokens=9 * PLACE_TOKENS)
    for number in range(40):
        await accept(store, f"p{number}", tokens=0)
    assert Counter(name[0] for name in await order(store, 33)) in ({"h": 3, "p": 30}, {"h": 4, "p": 29})


async def test_take_reads_prompts_up_to_token_demand(store: RedisScripts) -> None:
    """The last prompt may exceed the demand. Batch requests wait until all interactive ones are read."""
    await accept(store, *[f"h{number}" for number in range(9)], tokens=1_000)
    await accept(store, "b", priority_class="batch")

    async def take_tokens(num_tokens: int) -> list[str]:
        return [entry.request_id for entry in (await store.take(WORKER, Demand(100, prompt_tokens=num_tokens))).entries]

    assert await take_tokens(1_500) == ["h0", "h1"]
    await accept(store, "p0", tokens=10)
    assert await take_tokens(1_500) in (["h2", "p0", "h3"], ["p0", "h2", "h3"], ["h2", "h3"])
    assert await take_tokens(0) == []
    assert set(await take_tokens(10_000)) >= {"h4", "h5", "h6", "h7", "h8", "b"}


async def test_take_unknown_prompt_length_uses_likely_length(store: RedisScripts) -> None:
    """Older gateways do not send the length, and neither does an unclaim."""
    for number in range(9):
        await store.accept(f"a{number}", b"body", gateway_id="g", priority_class="interactive")
    demand = Demand(100, prompt_tokens=1_000, likely_prompt_tokens=300)
    assert [entry.request_id for entry in (await store.take(WORKER, demand)).entries] == ["a0", "a1", "a2", "a3"]


async def test_turns_new_key_does_not_catch_up(store: RedisScripts) -> None:
    await accept(store, *[f"h{number}" for number in range(40)])
    assert await order(store, 20, 5) == [f"h{number}" for number in range(20)]
    await accept(store, *[f"p{number}" for number in range(10)])
    found = await order(store, 10)
    assert Counter(name[0] for name in found)["h"] in (4, 5)


async def test_take_may_read_thousands_at_once(store: RedisScripts, redis: Redis, keys: RedisKeys) -> None:
    """Lua passes at most 8,000 arguments to a command."""
    for start in range(0, 9_000, 1_000):
        await accept(store, *[f"h{number}" for number in range(start, start + 1_000)])
    assert len(await take(store, 20_000)) == 9_000
    assert not await redis.exists(*keys.turns("interactive"))


async def test_turns_single_key_stays_in_queue_of_its_class(store: RedisScripts, keys: RedisKeys) -> None:
    for number in range(5):
        await accept(store, f"h{number}")
    entries = await take(store, 5)
    assert [entry.request_id for entry in entries] == [f"h{number}" for number in range(5)]
    assert {entry.queue for entry in entries} == {keys.queue("interactive")}


async def test_turns_overtaking_entry_moves_to_resumed_queue(
    store: RedisScripts, redis: Redis, keys: RedisKeys
) -> None:
    """Queue lengths still count every request, and the entry keeps its waiting time."""
    await accept(store, "h0", "h1", "h2")
    await accept(store, "p0")
    stored: Any = await redis.xrange(keys.queue("interactive"))
    before = stored[-1][0]
    entries = {entry.request_id: entry for entry in await take(store, 3)}
    assert entries["p0"].queue == keys.queue(RESUMED)
    assert [await redis.xlen(queue) for queue in keys.queues] == [1, 0, 3, 0]
    assert entries["p0"].queued_ms == int(before.split(b"-")[0])
    assert all(await store.claim(WORKER, list(entries.values())))
    ended = [Ending(entry.request_id, entry.queue, entry.entry_id, b"end") for entry in entries.values()]
    assert await store.finish(WORKER, ended, []) == 3


async def test_accept_repeated_has_one_turn(store: RedisScripts, redis: Redis, keys: RedisKeys) -> None:
    await accept(store, "a")
    await accept(store, "a")
    assert await redis.zcard(keys.turns("interactive")[0]) == 1


async def test_batch_requests_have_no_turns(store: RedisScripts, redis: Redis, keys: RedisKeys) -> None:
    await accept(store, "a", priority_class="batch")
    assert not await redis.exists(*keys.turns("interactive"))
    assert [entry.request_id for entry in await take(store)] == ["a"]


async def test_turns_are_deleted_when_nothing_waits(store: RedisScripts, redis: Redis, keys: RedisKeys) -> None:
    await accept(store, *[f"h{number}" for number in range(5)])
    await accept(store, "p0")
    assert len(await take(store, 6)) == 6
    assert await take(store) == []
    assert not await redis.exists(*keys.turns("interactive"))


async def test_turns_cancelled_request_has_none(store: RedisScripts, redis: Redis, keys: RedisKeys) -> None:
    await accept(store, *[f"h{number}" for number in range(5)])
    await accept(store, *[f"p{number}" for number in range(5)])
    for name in ("p0", "p2", "h0", "h1"):
        await store.cancel(name, "interactive")
    assert set(await order(store, 6, 2)) == {"h2", "h3", "h4", "p1", "p3", "p4"}
    assert await take(store) == []
    assert not await redis.exists(*keys.turns("interactive"))


async def test_turns_entry_read_by_another_is_skipped(store: RedisScripts, redis: Redis, keys: RedisKeys) -> None:
    """A blocking worker reads the oldest entry without a script, so `order` still contains it."""
    await accept(store, "h0", "h1", "h2")
    await accept(store, "p0")
    await store.register("w.2")
    await redis.xreadgroup(GROUP, "w.2", {keys.queue("interactive"): ">"}, count=1)
    assert sorted(await order(store, 3)) == ["h1", "h2", "p0"]
    assert (await redis.xpending(keys.queue("interactive"), GROUP))["consumers"][-1]["name"] == b"w.2"


async def test_turns_entries_missing_in_order_are_read_first(
    store: RedisScripts, redis: Redis, keys: RedisKeys
) -> None:
    """Older gateways and a store that lost `order` leave such entries. They must not wait for a turn."""
    await accept(store, "h0", "h1", "h2")
    await accept(store, "p0")
    await redis.delete(keys.turns("interactive")[0])
    for number in range(4):
        await accept(store, f"q{number}", tokens=1)
    found = await order(store, 8)
    assert sorted(found[:4]) == ["h0", "h1", "h2", "p0"]
    assert sorted(found) == ["h0", "h1", "h2", "p0", "q0", "q1", "q2", "q3"]


async def test_turns_unread_numbers_do_not_accumulate(store: RedisScripts, redis: Redis, keys: RedisKeys) -> None:
    """Workers of the previous release do not use `order`."""
    for number in range(50):
        await accept(store, f"a{number}")
        reply: Any = await redis.xreadgroup(GROUP, WORKER, {keys.queue("interactive"): ">"})
        entry = queue_entry(reply[0][0], *reply[0][1][0])
        await store.claim(WORKER, [entry])
        await store.finish(WORKER, [Ending(f"a{number}", entry.queue, entry.entry_id, b"end")], [])
    assert await redis.zcard(keys.turns("interactive")[0]) <= 1


@dataclass
class History:
    """Random accepts, takes, lost replies, cancels, ends, unclaims, and deaths of three workers and many keys."""

    scripts: RedisScripts
    chance: random.Random
    held: dict[str, dict[str, QueueEntry]] = field(default_factory=lambda: {f"w.{number}": {} for number in range(3)})
    alive: set[str] = field(default_factory=set)
    num_accepted: int = 0
    num_moved: int = 0

    @property
    def waiting(self) -> list[str]:
        return sorted(self.alive.difference(*self.held.values()))

    async def act(self) -> None:
        worker = self.chance.choice(list(self.held))
        acts = (self.accept, self.take, self.die, self.cancel, self.give_back, self.end)
        await self.chance.choices(acts, weights=(7, 5, 1, 2, 2, 3))[0](worker)

    async def accept(self, worker: str) -> None:
        self.num_accepted += 1
        key, count = self.chance.choice("aaaabc"), self.chance.choice((1, 1, 5))
        names = [f"{key}{self.num_accepted}-{part}" for part in range(count)]
        await accept(self.scripts, *names, tokens=self.chance.choice((1, 100, 8_000)))
        self.alive.update(names)

    async def take(self, worker: str) -> None:
        entries = (await self.scripts.take(worker, Demand(self.chance.randint(1, 6)))).entries
        assert all(await self.scripts.claim(worker, entries))
        assert {entry.request_id for entry in entries} <= {*self.waiting}
        self.held[worker] |= {entry.request_id: entry for entry in entries}
        self.num_moved += sum(entry.queue == self.scripts.keys.queue(RESUMED) for entry in entries)

    async def die(self, worker: str) -> None:
        """Die after the reply to a blocking read, which does not update `order`."""
        await self.scripts.redis.xreadgroup(GROUP, worker, {self.scripts.keys.queue("interactive"): ">"}, count=1)
        await reap_worker(self.scripts, worker, ReapMode.DRAIN)
        self.held[worker].clear()
        await self.scripts.register(worker)

    async def cancel(self, worker: str) -> None:
        if self.waiting:
            name = self.chance.choice(self.waiting)
            assert await self.scripts.cancel(name, "interactive")
            self.alive.discard(name)

    async def give_back(self, worker: str) -> None:
        if held := self.held[worker]:
            entry = held.pop(self.chance.choice(sorted(held)))
            assert await self.scripts.unclaim(worker, [entry]) == 1

    async def end(self, worker: str) -> None:
        if held := self.held[worker]:
            name = self.chance.choice(sorted(held))
            entry = held.pop(name)
            assert await self.scripts.finish(worker, [Ending(name, entry.queue, entry.entry_id, b"end")], []) == 1
            self.alive.discard(name)


async def test_turns_random_histories_lose_and_duplicate_nothing(
    connections: RedisConnections, keys: RedisKeys
) -> None:
    redis, num_moved = connections.commands, 0
    for seed in range(30):
        await redis.flushall()
        history = History(scripts := RedisScripts(redis, keys), random.Random(seed))
        for worker in history.held:
            await scripts.register(worker)
        for _ in range(120):
            await history.act()
        rest, waiting = list[str](), history.waiting
        while taken := (await scripts.take("w.1", Demand(10_000), is_impatient=True)).entries:
            rest += [entry.request_id for entry in taken]
        assert sorted(rest) == waiting, seed
        assert sum([await redis.xlen(queue) for queue in keys.queues]) == len(history.alive)
        num_moved += history.num_moved
    assert num_moved > 100  # otherwise the histories test too little


async def take_of_others(scripts: RedisScripts, count: int, *waiting: str, wanted: int = 0) -> list[str]:
    taken = await scripts.take(WORKER, Demand(wanted, others=count), waiting_flows=[f"k:{key}" for key in waiting])
    return [entry.request_id for entry in taken.entries]


async def test_take_full_worker_reads_one_request_per_other_key(store: RedisScripts) -> None:
    await accept(store, *[f"h{number}" for number in range(300)])
    assert await take_of_others(store, 2, "h") == []
    for key in "pqr":
        await accept(store, *[f"{key}{number}" for number in range(3)])
    assert await take_of_others(store, 2, "h") == ["p0", "q0"]
    assert await take_of_others(store, 9, "h", "p", "q") == ["r0"]
    assert await take_of_others(store, 9, "h", "p", "q", "r") == []
    assert set(await order(store, 306, each=306)) >= {"h299", "p2", "q2", "r2"}  # none is lost


async def test_take_reads_other_keys_beside_wanted_requests(store: RedisScripts) -> None:
    await accept(store, *[f"h{number}" for number in range(9)])
    await accept(store, "p0")
    assert await take_of_others(store, 1, "h", wanted=1) in (["h0", "p0"], ["p0"])


async def test_take_full_worker_skips_unclaimed_requests(store: RedisScripts) -> None:
    await accept(store, "h0", "h1")
    await accept(store, "p0")
    (entry,) = await take(store)
    await store.claim(WORKER, [entry])
    await store.unclaim(WORKER, [entry])
    assert await take_of_others(store, 4, "h") == []  # it is in a class above, and its key is unknown
