"""Requests of several keys are read in turns, whatever one of them has queued (order.lua)."""

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
from shared.redis_scripts import PLACE_TOKENS, Demand, Ending, QueueEntry, ReapMode, RedisScripts

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
    """Requests of one answer, of the key that is their first letter."""
    requests = [NewRequest(request_id, b"body", num_prompt_tokens=tokens) for request_id in request_ids]
    await scripts.accept_all(requests, gateway_id="g", priority_class=priority_class, share=Share(request_ids[0][0]))


async def take(scripts: RedisScripts, count: int = 1) -> list[QueueEntry]:
    return (await scripts.take(WORKER, Demand(count))).entries


async def order(scripts: RedisScripts, count: int, each: int = 1) -> list[str]:
    return [entry.request_id for _ in range(0, count, each) for entry in await take(scripts, each)]


@pytest.mark.parametrize("each", [1, 3, 100])
async def test_a_key_does_not_wait_for_all_that_another_has_queued(store: RedisScripts, each: int) -> None:
    await accept(store, *[f"h{number}" for number in range(50)])
    await accept(store, "p0")
    await accept(store, "p1")
    found = await order(store, 99, each)
    assert sorted(found[1:4]) == ["h1", "p0", "p1"] or sorted(found[:3]) == ["h0", "h1", "p0"]
    assert set(found) == {"p0", "p1", *[f"h{number}" for number in range(50)]}
    for key in "hp":  # each key's own in their order
        mine = [int(name[1:]) for name in found if name[0] == key]
        assert all(a < b for a, b in pairwise(mine))


async def test_a_key_has_turns_by_what_they_cost(store: RedisScripts) -> None:
    """A prompt of 1,152 tokens is as much as ten of none: a choice's place is worth PLACE_TOKENS."""
    await accept(store, *[f"h{number}" for number in range(20)], tokens=9 * PLACE_TOKENS)
    for number in range(40):
        await accept(store, f"p{number}", tokens=0)
    assert Counter(name[0] for name in await order(store, 33)) in ({"h": 3, "p": 30}, {"h": 4, "p": 29})


async def test_a_worker_reads_no_more_prompts_than_it_can_compute_soon(store: RedisScripts) -> None:
    """The last one may be longer than what is left, of one key as of several. Batches wait until it has read all."""
    await accept(store, *[f"h{number}" for number in range(9)], tokens=1_000)
    await accept(store, "b", priority_class="batch")

    async def take_tokens(num_tokens: int) -> list[str]:
        return [entry.request_id for entry in (await store.take(WORKER, Demand(100, prompt_tokens=num_tokens))).entries]

    assert await take_tokens(1_500) == ["h0", "h1"]
    await accept(store, "p0", tokens=10)
    assert await take_tokens(1_500) in (["h2", "p0", "h3"], ["p0", "h2", "h3"], ["h2", "h3"])
    assert await take_tokens(0) == []
    assert set(await take_tokens(10_000)) >= {"h4", "h5", "h6", "h7", "h8", "b"}


async def test_a_prompt_of_which_nobody_says_is_as_long_as_is_likely(store: RedisScripts) -> None:
    """A gateway of before does not, nor does whoever gives a request back."""
    for number in range(9):
        await store.accept(f"a{number}", b"body", gateway_id="g", priority_class="interactive")
    demand = Demand(100, prompt_tokens=1_000, likely_prompt_tokens=300)
    assert [entry.request_id for entry in (await store.take(WORKER, demand)).entries] == ["a0", "a1", "a2", "a3"]


async def test_who_comes_later_has_no_claim_to_the_past(store: RedisScripts) -> None:
    await accept(store, *[f"h{number}" for number in range(40)])
    assert await order(store, 20, 5) == [f"h{number}" for number in range(20)]
    await accept(store, *[f"p{number}" for number in range(10)])
    found = await order(store, 10)
    assert Counter(name[0] for name in found)["h"] in (4, 5)


async def test_a_worker_may_read_as_many_as_there_are(store: RedisScripts, redis: Redis, keys: RedisKeys) -> None:
    """Lua hands no more than 8,000 arguments to a command."""
    for start in range(0, 9_000, 1_000):
        await accept(store, *[f"h{number}" for number in range(start, start + 1_000)])
    assert len(await take(store, 20_000)) == 9_000
    assert not await redis.exists(*keys.turns("interactive"))


async def test_one_keys_requests_stay_in_the_queue_of_their_class(store: RedisScripts, keys: RedisKeys) -> None:
    for number in range(5):
        await accept(store, f"h{number}")
    entries = await take(store, 5)
    assert [entry.request_id for entry in entries] == [f"h{number}" for number in range(5)]
    assert {entry.queue for entry in entries} == {keys.queue("interactive")}


async def test_one_that_overtakes_goes_where_the_older_ones_are(
    store: RedisScripts, redis: Redis, keys: RedisKeys
) -> None:
    """So that the lengths of the queues are the requests that there are; its time of waiting is that of before."""
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


async def test_a_repeat_of_accept_has_one_turn(store: RedisScripts, redis: Redis, keys: RedisKeys) -> None:
    await accept(store, "a")
    await accept(store, "a")
    assert await redis.zcard(keys.turns("interactive")[0]) == 1


async def test_a_batch_has_no_turns(store: RedisScripts, redis: Redis, keys: RedisKeys) -> None:
    await accept(store, "a", priority_class="batch")
    assert not await redis.exists(*keys.turns("interactive"))
    assert [entry.request_id for entry in await take(store)] == ["a"]


async def test_when_nothing_waits_all_keys_begin_anew(store: RedisScripts, redis: Redis, keys: RedisKeys) -> None:
    await accept(store, *[f"h{number}" for number in range(5)])
    await accept(store, "p0")
    assert len(await take(store, 6)) == 6
    assert await take(store) == []
    assert not await redis.exists(*keys.turns("interactive"))


async def test_what_was_cancelled_has_no_turn(store: RedisScripts, redis: Redis, keys: RedisKeys) -> None:
    await accept(store, *[f"h{number}" for number in range(5)])
    await accept(store, *[f"p{number}" for number in range(5)])
    for name in ("p0", "p2", "h0", "h1"):
        await store.cancel(name, "interactive")
    assert set(await order(store, 6, 2)) == {"h2", "h3", "h4", "p1", "p3", "p4"}
    assert await take(store) == []
    assert not await redis.exists(*keys.turns("interactive"))


async def test_what_another_has_read_is_left_to_it(store: RedisScripts, redis: Redis, keys: RedisKeys) -> None:
    """A worker that blocks reads the oldest without a script: `order` hears nothing of it."""
    await accept(store, "h0", "h1", "h2")
    await accept(store, "p0")
    await store.register("w.2")
    await redis.xreadgroup(GROUP, "w.2", {keys.queue("interactive"): ">"}, count=1)
    assert sorted(await order(store, 3)) == ["h1", "h2", "p0"]
    assert (await redis.xpending(keys.queue("interactive"), GROUP))["consumers"][-1]["name"] == b"w.2"


async def test_entries_without_a_number_are_read_as_the_oldest(
    store: RedisScripts, redis: Redis, keys: RedisKeys
) -> None:
    """They are of gateways of before, or of a store that lost `order`: they wait for nobody's turn."""
    await accept(store, "h0", "h1", "h2")
    await accept(store, "p0")
    await redis.delete(keys.turns("interactive")[0])
    for number in range(4):
        await accept(store, f"q{number}", tokens=1)
    found = await order(store, 8)
    assert sorted(found[:4]) == ["h0", "h1", "h2", "p0"]
    assert sorted(found) == ["h0", "h1", "h2", "p0", "q0", "q1", "q2", "q3"]


async def test_numbers_that_no_worker_reads_do_not_pile_up(store: RedisScripts, redis: Redis, keys: RedisKeys) -> None:
    """Workers of the release before know no `order`."""
    for number in range(50):
        await accept(store, f"a{number}")
        reply: Any = await redis.xreadgroup(GROUP, WORKER, {keys.queue("interactive"): ">"})
        entry_id = reply[0][1][0][0]
        await store.finish(WORKER, [Ending(f"a{number}", keys.queue("interactive"), entry_id)], [])
    assert await redis.zcard(keys.turns("interactive")[0]) <= 1


@dataclass
class History:
    """Accepts of many keys, takes of several workers, lost replies, cancels, ends, hand-backs and deaths."""

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
        """It dies of the reply to a blocking read, which `order` hears nothing of."""
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


async def test_random_histories_lose_and_double_nothing(connections: RedisConnections, keys: RedisKeys) -> None:
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
    assert num_moved > 100  # or little was tried


async def take_of_others(scripts: RedisScripts, count: int, *waiting: str, wanted: int = 0) -> list[str]:
    taken = await scripts.take(WORKER, Demand(wanted, others=count), waiting_flows=[f"k:{key}" for key in waiting])
    return [entry.request_id for entry in taken.entries]


async def test_a_full_worker_reads_one_request_of_each_other_key(store: RedisScripts) -> None:
    await accept(store, *[f"h{number}" for number in range(300)])
    assert await take_of_others(store, 2, "h") == []
    for key in "pqr":
        await accept(store, *[f"{key}{number}" for number in range(3)])
    assert await take_of_others(store, 2, "h") == ["p0", "q0"]
    assert await take_of_others(store, 9, "h", "p", "q") == ["r0"]
    assert await take_of_others(store, 9, "h", "p", "q", "r") == []
    assert set(await order(store, 306, each=306)) >= {"h299", "p2", "q2", "r2"}  # nothing is lost


async def test_requests_of_others_come_beside_those_wanted(store: RedisScripts) -> None:
    await accept(store, *[f"h{number}" for number in range(9)])
    await accept(store, "p0")
    assert await take_of_others(store, 1, "h", wanted=1) in (["h0", "p0"], ["p0"])


async def test_a_full_worker_leaves_what_was_given_back_to_others(store: RedisScripts) -> None:
    await accept(store, "h0", "h1")
    await accept(store, "p0")
    (entry,) = await take(store)
    await store.claim(WORKER, [entry])
    await store.unclaim(WORKER, [entry])
    assert await take_of_others(store, 4, "h") == []  # it has a class above, and whose it is nobody knows
