"""Queue places are divided between API keys (accept.lua); turns survive cancellations and older versions."""

from itertools import product
from typing import Any

import pytest
from redis.asyncio import Redis

from shared.new_requests import NewRequest, Share
from shared.redis_client import RedisConnections
from shared.redis_keys import GROUP, INTERACTIVE, PRIORITY_CLASSES, RedisKeys
from shared.redis_scripts import (
    AcceptStatus,
    Demand,
    Ending,
    QueueEntry,
    QueueShareExceeded,
    RedisScripts,
    StartsTooLate,
    queue_entry,
)
from shared.shares import may_take

WORKER = "w.1"
CAP = 100


@pytest.fixture
def redis(connections: RedisConnections) -> Redis:
    return connections.commands


@pytest.fixture
async def store(scripts: RedisScripts) -> RedisScripts:
    await scripts.register(WORKER)
    return scripts


async def accept(
    scripts: RedisScripts,
    key: str,
    count: int = 1,
    *,
    name: str = "",
    tokens: int = 100,
    priority_class: str = INTERACTIVE,
    cap: int = CAP,
    most_ahead: int = -1,
    **share: float,
) -> AcceptStatus:
    """Queue one body with `count` prompts. `share` sets fields of Share."""
    requests = [NewRequest(f"{key}{name}-{number}", b"body", num_prompt_tokens=tokens) for number in range(count)]
    queue_share = Share(key, **{"divides_queue": True, **share})  # type: ignore[arg-type]
    return await scripts.accept_all(
        requests,
        gateway_id="g",
        priority_class=priority_class,
        max_queued=cap,
        share=queue_share,
        most_ahead=most_ahead,
    )


async def fill(scripts: RedisScripts, key: str, body: int = 1, **options: object) -> int:
    """Queue bodies of a key until one is refused; return the number of queued requests."""
    for number in range(1_000):
        try:
            status = await accept(scripts, key, body, name=f"fill{number}", **options)  # type: ignore[arg-type]
        except QueueShareExceeded:
            return number * body
        if status is AcceptStatus.BUSY:
            return number * body
    raise AssertionError("nothing was refused")


async def take(scripts: RedisScripts, count: int) -> list[QueueEntry]:
    return (await scripts.take(WORKER, Demand(count, room=1_000), is_impatient=False)).entries


async def keys_read(scripts: RedisScripts, count: int) -> str:
    """Return the first letters of the requests that are read next, one at a time."""
    return "".join([entry.request_id[0] for _ in range(count) for entry in await take(scripts, 1)])


async def cancel_body(scripts: RedisScripts, key: str, count: int, name: str = "") -> None:
    for number in range(count):
        assert await scripts.cancel(f"{key}{name}-{number}", INTERACTIVE)


async def unread(redis: Redis, keys: RedisKeys) -> list[bytes]:
    """Return the ids of interactive entries that no worker has read."""
    entries: Any = await redis.xrange(keys.queue(INTERACTIVE))
    groups = await redis.xinfo_groups(keys.queue(INTERACTIVE))
    last = groups[0]["last-delivered-id"]
    return [entry_id for entry_id, _ in entries if _order(entry_id) > _order(last)]


def _order(entry_id: bytes) -> tuple[int, ...]:
    return tuple(int(part) for part in entry_id.split(b"-"))


class TestRequestsAhead:
    async def test_requests_beyond_the_limit_are_late(self, store: RedisScripts, redis: Redis, keys: RedisKeys) -> None:
        await accept(store, "a", 10, divides_queue=False)
        assert await accept(store, "a", name="x", most_ahead=10, divides_queue=False) is AcceptStatus.OK
        with pytest.raises(StartsTooLate) as late:
            await accept(store, "a", name="y", most_ahead=10, divides_queue=False)
        assert late.value.num_ahead == 11
        assert not await redis.exists(keys.request("ay-0")) and len(await unread(redis, keys)) == 11

    async def test_read_requests_are_not_ahead(self, store: RedisScripts) -> None:
        await accept(store, "a", 10, divides_queue=False)
        await take(store, 6)
        assert await accept(store, "a", name="x", most_ahead=4, divides_queue=False) is AcceptStatus.OK

    async def test_only_requests_with_an_earlier_turn_are_ahead(self, store: RedisScripts) -> None:
        await accept(store, "a", 20)
        assert await accept(store, "b", name="x", most_ahead=1) is AcceptStatus.OK
        with pytest.raises(StartsTooLate):
            await accept(store, "a", name="y", most_ahead=1)


class TestShares:
    @pytest.mark.parametrize(
        ("held", "others", "want", "weight"),
        [
            *product((0, 1, 40, 79, 80), (1, 9, 50), (1, 4, 32), (1.0,)),
            (10, 40, 9, 0.1),
            (10, 40, 10, 0.1),
            (20, 60, 5, 4),
        ],
    )
    async def test_accept_decides_as_may_take(
        self, store: RedisScripts, held: int, others: int, want: int, weight: float
    ) -> None:
        if held:
            await accept(store, "a", held, divides_queue=False, cap=-1)
        await accept(store, "b", others, divides_queue=False, cap=-1)
        try:
            is_accepted = await accept(store, "a", want, name="x", weight=weight) is AcceptStatus.OK
        except QueueShareExceeded:
            is_accepted = False
        assert is_accepted == may_take(held, want, CAP - held - others, weight)

    @pytest.mark.parametrize("priority_class", PRIORITY_CLASSES)
    async def test_full_share_of_one_key_leaves_places(self, store: RedisScripts, priority_class: str) -> None:
        assert await fill(store, "a", 4, priority_class=priority_class) == 80
        for number in range(16):
            assert await accept(store, "b", name=f"{number}", priority_class=priority_class) is AcceptStatus.OK
        with pytest.raises(QueueShareExceeded):
            await accept(store, "a", name="more", priority_class=priority_class)

    async def test_lone_key_uses_all_places(self, store: RedisScripts) -> None:
        assert await fill(store, "a", divides_queue=False) == CAP

    async def test_refusal_says_how_many_places_the_key_may_hold(self, store: RedisScripts) -> None:
        await fill(store, "a")
        with pytest.raises(QueueShareExceeded) as refused:
            await accept(store, "a", 5, name="more")
        assert refused.value.max_places == 80

    async def test_body_over_the_free_places_of_a_fair_key_is_busy(self, store: RedisScripts) -> None:
        """The queue has fewer free places than the body needs, although its key holds none."""
        await accept(store, "a", 90, divides_queue=False)
        assert await accept(store, "b", 11) is AcceptStatus.BUSY

    async def test_body_over_the_cap_is_taken_by_an_empty_queue(self, store: RedisScripts) -> None:
        assert await accept(store, "a", CAP + 1) is AcceptStatus.OK

    async def test_running_requests_take_no_place(self, store: RedisScripts) -> None:
        await accept(store, "a", 80, divides_queue=False)
        assert len(await take(store, 80)) == 80
        assert await fill(store, "a") == 80
        assert await accept(store, "b") is AcceptStatus.OK

    async def test_cancelled_requests_give_their_places_back(self, store: RedisScripts) -> None:
        await accept(store, "b", 10)
        await accept(store, "a", 40)
        await cancel_body(store, "a", 40)
        assert await fill(store, "a") == 72

    @pytest.mark.parametrize("priority_class", PRIORITY_CLASSES)
    async def test_read_requests_give_their_places_back(self, store: RedisScripts, priority_class: str) -> None:
        await accept(store, "a", 63, priority_class=priority_class)
        assert len(await take(store, 60)) == 60
        await accept(store, "b", 17, priority_class=priority_class)
        assert await fill(store, "a", priority_class=priority_class) == 64


class TestTurns:
    async def test_cancelled_body_changes_no_turn(self, store: RedisScripts) -> None:
        await accept(store, "a", 32, name="gone")
        await cancel_body(store, "a", 32, name="gone")
        for number in range(14):
            await accept(store, "a", name=f"{number}", tokens=1_500)
        await accept(store, "b", tokens=1)
        assert "b" in await keys_read(store, 2)

    async def test_order_has_exactly_the_entries_that_wait(
        self, store: RedisScripts, redis: Redis, keys: RedisKeys
    ) -> None:
        await accept(store, "a", 9)
        await accept(store, "b", 3)
        await take(store, 4)
        for number in (8, 7):
            assert await store.cancel(f"a-{number}", INTERACTIVE)
        in_order: Any = await redis.zrange(keys.turns(INTERACTIVE)[0], 0, -1)
        assert sorted(in_order, key=_order) == await unread(redis, keys)
        assert len(in_order) == 6

    async def test_weights_divide_turns(self, store: RedisScripts) -> None:
        for number in range(70):
            for key, weight in (("a", 1.0), ("b", 2.0), ("c", 4.0)):
                await accept(store, key, name=f"{number}", weight=weight, cap=-1)
        found = await keys_read(store, 70)
        assert [found.count(key) for key in "abc"] == pytest.approx([10, 20, 40], abs=1)


class TestOlderVersions:
    """The gateway of the previous version wrote no `f` and left cancelled entries in `order`."""

    @staticmethod
    async def leave_cancelled(redis: Redis, keys: RedisKeys, count: int) -> None:
        order = keys.turns(INTERACTIVE)[0]
        await redis.zadd(order, {f"1-{number}": 0 for number in range(count)})

    async def test_stale_turns_are_dropped_while_reading(
        self, store: RedisScripts, redis: Redis, keys: RedisKeys
    ) -> None:
        await accept(store, "a", 14, tokens=1_500)
        await accept(store, "b", tokens=1)
        await self.leave_cancelled(redis, keys, 200)
        assert "b" in await keys_read(store, 2)
        assert await redis.zcard(keys.turns(INTERACTIVE)[0]) == 13

    async def test_many_stale_turns_are_dropped_256_at_a_time(
        self, store: RedisScripts, redis: Redis, keys: RedisKeys
    ) -> None:
        await accept(store, "a", 5)
        await accept(store, "b", 5)
        await self.leave_cancelled(redis, keys, 600)
        assert len(await take(store, 1)) == 1
        assert await redis.zcard(keys.turns(INTERACTIVE)[0]) == 610 - 256 - 1

    async def test_accept_keeps_turns_beside_stale_ones(
        self, store: RedisScripts, redis: Redis, keys: RedisKeys
    ) -> None:
        await accept(store, "a", 14, tokens=1_500)
        await self.leave_cancelled(redis, keys, 32)
        await accept(store, "b", tokens=1)
        assert "b" in await keys_read(store, 2)

    async def test_places_that_an_older_worker_read_come_back(
        self, store: RedisScripts, redis: Redis, keys: RedisKeys
    ) -> None:
        """An older worker reads without a count. The waiting entries limit the count."""
        for number in range(40):
            assert await accept(store, "a", 10, name=f"{number}") is AcceptStatus.OK
            await redis.xreadgroup(GROUP, WORKER, {keys.queue(INTERACTIVE): ">"}, count=9)

    async def test_counts_begin_again_once_nothing_waits(
        self, store: RedisScripts, redis: Redis, keys: RedisKeys
    ) -> None:
        queue = keys.queue(INTERACTIVE)
        await accept(store, "a", 9)
        await redis.xreadgroup(GROUP, WORKER, {queue: ">"})
        for number in range(9):
            entries: Any = await redis.xrange(queue)
            entry = queue_entry(queue.encode(), *entries[0])
            await store.claim(WORKER, [entry])
            await store.finish(WORKER, [Ending(f"a-{number}", queue, entry.entry_id, b"end")], [])
        await accept(store, "a", name="again")
        stored: Any = await redis.hget(keys.turns(INTERACTIVE)[1], "k:a")
        assert stored.endswith(b" 1")

    async def test_turn_without_a_count_is_read(self, store: RedisScripts, redis: Redis, keys: RedisKeys) -> None:
        await accept(store, "b", 2)
        await redis.hset(keys.turns(INTERACTIVE)[1], mapping={"k:a": "750.5"})
        await accept(store, "a", name="late")
        scores = await redis.zrange(keys.turns(INTERACTIVE)[0], 0, -1, withscores=True)
        assert scores[-1][1] == 750.5
