"""Each script on a real server: its effect, and that a blind repeat changes nothing."""

from typing import Any

import pytest
from redis.asyncio import Redis

from shared.messages import (
    PROTOCOL_VERSION,
    ErrorEvent,
    EventBatch,
    StreamEvent,
    TokenEvent,
    decode_event_batch,
    decode_terminal_event,
    encode,
)
from shared.new_requests import RetentionTerms
from shared.reaping import ReapSummary, list_worker_ids, reap_worker, reap_workers_with_prefix
from shared.redis_client import RedisConnections
from shared.redis_keys import GROUP, RESUMED, RedisKeys
from shared.redis_scripts import (
    AcceptStatus,
    AttachStatus,
    Demand,
    Ending,
    Fenced,
    GatewayMessage,
    QueueEntry,
    ReapMode,
    RedisScripts,
    StepFrame,
    gateway_message,
)
from tests.patience import PATIENCE_SECONDS

WORKER = "w0.aaaa"


@pytest.fixture
def redis(connections: RedisConnections) -> Redis:
    return connections.commands


async def accept(scripts: RedisScripts, request_id: str = "a", **options) -> AcceptStatus:
    options = {"gateway_id": "g", "priority_class": "interactive", **options}
    return await scripts.accept(request_id, b"body-" + request_id.encode(), **options)


async def start(scripts: RedisScripts, *request_ids: str, worker_id: str = WORKER) -> list[QueueEntry]:
    """Accept, register, take, and claim these requests."""
    for request_id in request_ids:
        await accept(scripts, request_id)
    await scripts.register(worker_id)
    return await continue_with(scripts, worker_id)


async def continue_with_all(scripts: RedisScripts, request_ids: list[str]) -> list[QueueEntry]:
    entries = await start(scripts, *request_ids[:100])
    for start_at in range(100, len(request_ids), 100):
        entries += await start(scripts, *request_ids[start_at : start_at + 100])
    return entries


async def continue_with(scripts: RedisScripts, worker_id: str) -> list[QueueEntry]:
    entries = (await scripts.take(worker_id, Demand(100))).entries
    await scripts.claim(worker_id, entries)
    return entries


def frame(entry: QueueEntry, data: bytes) -> StepFrame:
    return StepFrame(entry.request_id, entry.entry_id, data)


def ending(entry: QueueEntry, event: bytes = b"end") -> Ending:
    return Ending(entry.request_id, entry.queue, entry.entry_id, event)


def message(blob: bytes) -> GatewayMessage:
    return GatewayMessage("g", blob, [])


def events_of(*request_ids: str, per_request: int = 1) -> GatewayMessage:
    """Return the message of a call with these requests, with `per_request` events each, interleaved."""
    events = [TokenEvent(name, index, [7]) for index in range(per_request) for name in request_ids]
    return gateway_message("g", WORKER, 1, events, {name: position for position, name in enumerate(request_ids)})


async def state(redis: Redis, keys: RedisKeys, request_id: str = "a") -> dict[str, str]:
    stored: dict[Any, Any] = await redis.hgetall(keys.request(request_id))
    return {name.decode(): value.decode(errors="replace") for name, value in stored.items()}


async def pending(redis: Redis, keys: RedisKeys) -> int:
    return sum([(await redis.xpending(queue, GROUP))["pending"] for queue in keys.queues])


async def queued(redis: Redis, keys: RedisKeys) -> int:
    return sum([await redis.xlen(queue) for queue in keys.queues])


class TestAccept:
    async def test_accept_repeated_stores_and_queues_once(self, scripts, redis, keys):
        assert [await accept(scripts) for _ in range(3)] == [AcceptStatus.OK, AcceptStatus.DUP, AcceptStatus.DUP]
        assert await redis.xlen(keys.queue("interactive")) == 1
        stored = await state(redis, keys)
        assert stored["body"] == "body-a"
        assert stored["attempt"] == "1"
        assert stored["state"] == "queued"

    async def test_accept_at_the_cap_is_refused_and_stores_nothing(self, scripts, redis, keys):
        assert await accept(scripts, "a", max_queued=1) is AcceptStatus.OK
        assert await accept(scripts, "b", max_queued=1) is AcceptStatus.BUSY
        assert await accept(scripts, "a", max_queued=1) is AcceptStatus.DUP  # a repeat adds no load
        assert await accept(scripts, "b", max_queued=1, priority_class="batch") is AcceptStatus.OK
        assert not await state(redis, keys, "c")

    async def test_accept_restores_journal_after_store_loss(self, scripts, redis, keys):
        await redis.set(keys.journal("a"), b"left over")
        await accept(scripts, "a", journal=b"12345")
        assert await redis.get(keys.journal("a")) == b"12345"
        assert (await state(redis, keys))["jl"] == "5"
        await redis.set(keys.journal("b"), b"left over")
        await accept(scripts, "b")
        assert await redis.get(keys.journal("b")) is None

    async def test_accept_before_group_exists_is_delivered(self, scripts):
        assert [entry.request_id for entry in await start(scripts, "a")] == ["a"]


class TestRegister:
    async def test_register_makes_worker_visible_before_first_read(self, scripts, redis, keys):
        await scripts.register(WORKER)
        await scripts.register(WORKER)
        assert await list_worker_ids(redis, keys) == [WORKER]
        assert await redis.get(keys.fence(WORKER)) == b"0"
        assert await redis.ttl(keys.fence(WORKER)) == -1

    async def test_register_repeated_does_not_reset_the_step(self, scripts, redis, keys):
        (entry,) = await start(scripts, "a")
        await scripts.emit(WORKER, 1, [frame(entry, b"x")], [])
        await scripts.register(WORKER)
        assert await redis.get(keys.fence(WORKER)) == b"1"


class TestTake:
    async def test_take_reads_classes_in_strict_order_up_to_count(self, scripts, redis, keys):
        await accept(scripts, "slow", priority_class="batch")
        await accept(scripts, "fast1")
        await accept(scripts, "fast2")
        await redis.xadd(keys.queue(RESUMED), {"r": "half", "s": "1"})
        await scripts.register(WORKER)
        first = (await scripts.take(WORKER, Demand(2))).entries
        assert [(entry.request_id, entry.solo) for entry in first] == [("half", True), ("fast1", False)]
        assert [entry.request_id for entry in (await scripts.take(WORKER, Demand(5))).entries] == ["fast2", "slow"]
        assert (await scripts.take(WORKER, Demand(5))).entries == []
        assert await pending(redis, keys) == 4

    async def test_take_fenced_worker_reads_nothing(self, scripts, redis, keys):
        await accept(scripts)
        await scripts.register("other.1")
        with pytest.raises(Fenced):
            await scripts.take(WORKER, Demand(1))
        assert await pending(redis, keys) == 0


class TestShares:
    """TAKE dispatches to the least-loaded worker. No value that a worker reports may stop the others."""

    async def workers(self, scripts: RedisScripts, *names: str) -> None:
        for name in names:
            await scripts.register(name)

    async def ask(self, scripts: RedisScripts, name: str, demand: Demand, **options) -> int:
        return len((await scripts.take(name, demand, **options)).entries)

    async def test_take_stays_within_a_quantum_of_least_loaded(self, scripts):
        await self.workers(scripts, "a.1", "b.1", "c.1")
        demand, held = Demand(20, room=50), dict.fromkeys(("a.1", "b.1", "c.1"), 0)
        for name in held:
            assert await self.ask(scripts, name, demand) == 0  # announces the worker
        for number in range(48):
            await accept(scripts, f"r{number}")
        for _ in range(30):
            for name in ("a.1", "a.1", "a.1", "b.1", "c.1"):  # one asks three times as often
                held[name] += await self.ask(scripts, name, demand, num_held=held[name])
                assert max(held.values()) - min(held.values()) <= 2
        assert sum(held.values()) == 48 and max(held.values()) / 16 <= 1.10

    async def test_take_quantum_is_an_eighth_of_a_large_load(self, scripts):
        await self.workers(scripts, "a.1", "b.1")
        await self.ask(scripts, "b.1", Demand(1, room=50), num_held=80)
        for number in range(50):
            await accept(scripts, f"r{number}")
        assert await self.ask(scripts, "a.1", Demand(40, room=50), num_held=75) == 15

    async def test_take_ignores_peer_without_room(self, scripts):
        await self.workers(scripts, "a.1", "full.1")
        await accept(scripts, "x")
        assert await self.ask(scripts, "full.1", Demand(1, room=1)) == 1
        for number in range(9):
            await accept(scripts, f"r{number}")
        assert await self.ask(scripts, "a.1", Demand(9, room=20), num_held=30) == 9

    async def test_take_reports_deferral_apart_from_empty_queue(self, scripts):
        await self.workers(scripts, "a.1", "low.1")
        await self.ask(scripts, "low.1", Demand(4, room=9))
        taken = await scripts.take("a.1", Demand(4, room=9), num_held=5)
        assert (taken.allowance, taken.others_wait) == (0, False)
        await accept(scripts, "x")
        taken = await scripts.take("a.1", Demand(4, room=9), num_held=5)
        assert (taken.entries, taken.allowance, taken.others_wait) == ([], 0, True)
        taken = await scripts.take("a.1", Demand(4, room=9), num_held=1)
        assert (len(taken.entries), taken.others_wait) == (1, False)

    async def test_take_impatient_gets_quantum_and_drops_silent_peer(self, scripts, redis, keys):
        await self.workers(scripts, "a.1", "silent.1")
        await self.ask(scripts, "silent.1", Demand(4, room=9))
        for number in range(9):
            await accept(scripts, f"r{number}")
        assert await self.ask(scripts, "a.1", Demand(9, room=9), num_held=5) == 0
        assert await self.ask(scripts, "a.1", Demand(9, room=9), num_held=5, is_impatient=True) == 2
        assert await redis.zscore(keys.held[0], "silent.1") is None
        assert await self.ask(scripts, "a.1", Demand(7, room=7), num_held=7) == 7
        await accept(scripts, "back")
        assert await self.ask(scripts, "silent.1", Demand(1, room=1)) == 1

    @pytest.mark.parametrize("said", [-5, -(10**30), 10**30, "nan", "-inf", "inf", "x", ""])
    async def test_take_absurd_numbers_stop_no_worker(self, scripts, redis, keys, said):
        await self.workers(scripts, "a.1", "odd.1")
        await self.ask(scripts, "odd.1", Demand(1, room=9), num_held=said)
        await scripts.level("odd.1", said, 9)
        for number in range(30):
            await accept(scripts, f"r{number}")
        assert await self.ask(scripts, "a.1", Demand(2, room=9)) == 2
        await redis.zadd(keys.held[0], {"odd.1": "-inf" if said in (-5, "nan") else "1e300"})  # no worker writes these
        assert await self.ask(scripts, "a.1", Demand(5, room=9), num_held=3, is_impatient=True) >= 2
        assert await self.ask(scripts, "odd.1", Demand(3, room=9), num_held=0) >= 2

    async def test_take_after_restored_store_corrects_held_counts(self, scripts, redis, keys):
        """A store that restarts from its file has an outdated `held`, and some of its workers no longer exist."""
        await self.workers(scripts, "a.1", "b.1")
        await redis.zadd(keys.held[0], {"a.1": 900, "b.1": 3, "gone.1": 0})
        for number in range(12):
            await accept(scripts, f"r{number}")
        assert await self.ask(scripts, "a.1", Demand(6, room=50), num_held=0) == 2  # limited by the missing worker
        assert await self.ask(scripts, "b.1", Demand(6, room=50), num_held=8) == 0
        assert await self.ask(scripts, "b.1", Demand(6, room=50), num_held=8, is_impatient=True) == 2
        assert await redis.zrange(keys.held[0], 0, -1, withscores=True) == [(b"b.1", 10.0)]
        assert await self.ask(scripts, "a.1", Demand(6, room=50), num_held=2) == 6

    async def test_take_batch_has_its_own_load_level(self, scripts):
        """A worker with room only for interactive requests delays no batch request of another."""
        await self.workers(scripts, "chats.1", "both.1")
        await self.ask(scripts, "chats.1", Demand(4, 0, room=9, background_room=0))
        for number in range(9):
            await accept(scripts, f"b{number}", priority_class="batch")
        both = Demand(9, 9, room=20, background_room=20)
        assert await self.ask(scripts, "both.1", both) == 9
        await accept(scripts, "chat")
        assert await self.ask(scripts, "both.1", both, num_held=9) == 0
        assert await self.ask(scripts, "chats.1", Demand(4, 0, room=9, background_room=0)) == 1

    async def test_take_ignores_reaped_worker(self, scripts, redis, keys):
        """The worker died between TAKE and CLAIM: another worker gets its entries, and no attempt is counted."""
        await self.workers(scripts, "dead.1", "a.1")
        for number in range(6):
            await accept(scripts, f"r{number}")
        assert await self.ask(scripts, "dead.1", Demand(2, 2, room=99, background_room=99)) == 2
        assert await reap_worker(scripts, "dead.1") == ReapSummary(requeued=2)
        assert [await redis.zcard(held) for held in keys.held] == [0, 0]
        assert await self.ask(scripts, "a.1", Demand(9, room=99), num_held=50) == 6
        assert (await state(redis, keys, "r0"))["attempt"] == "1"

    async def test_take_fast_worker_gets_twice_as_much_as_slow(self, scripts):
        """Each worker ends its oldest requests at its own pace, and both always have room."""
        await self.workers(scripts, "fast.1", "slow.1")
        held, done, queued = {"fast.1": 0, "slow.1": 0}, {"fast.1": 0, "slow.1": 0}, 0
        for tick in range(200):
            for _ in range(3):  # requests arrive as fast as both can serve them
                await accept(scripts, f"r{queued}")
                queued += 1
            for name, every in (("fast.1", 2), ("slow.1", 4)):
                ended = min(held[name], (held[name] // 4) if tick % every == 0 else 0)
                held[name] -= ended
                done[name] += ended
                held[name] += await self.ask(scripts, name, Demand(6, room=40), num_held=held[name])
        assert 2 * 0.85 <= done["fast.1"] / done["slow.1"] <= 2 * 1.15

    async def test_level_returns_lowest_peer_load_if_queue_is_empty(self, scripts, redis, keys):
        await self.workers(scripts, "a.1", "low.1")
        assert await scripts.level("a.1", 9, 5) is None
        await self.ask(scripts, "low.1", Demand(4, room=9), num_held=1)
        assert await scripts.level("a.1", 9, 5) == 1
        assert await redis.zscore(keys.held[0], "a.1") is None  # only workers that call TAKE are listed
        await accept(scripts, "x")
        assert await scripts.level("a.1", 9, 5) is None  # the peer can take the waiting request
        assert await self.ask(scripts, "low.1", Demand(1, room=9), num_held=1) == 1
        assert await scripts.level("low.1", 7, 0) is None
        assert await redis.zscore(keys.held[0], "low.1") is None  # it has no room
        await redis.delete(keys.fence("a.1"))
        with pytest.raises(Fenced):
            await scripts.level("a.1", 9, 5)


class TestUnclaim:
    async def test_unclaim_requeues_first_in_order_with_counts(self, scripts, redis, keys):
        entries = await start(scripts, "a", "b", "c")
        await redis.hset(keys.request("b"), mapping={"attempt": 3, "strikes": 2, "solo": "1", "jl": 7})
        await accept(scripts, "later")
        assert await scripts.unclaim(WORKER, entries[1:]) == 2
        assert await scripts.unclaim(WORKER, entries[1:]) == 0  # a repeat after a lost reply
        stored = await state(redis, keys, "b")
        assert [stored[name] for name in ("state", "attempt", "strikes", "jl")] == ["queued", "3", "2", "7"]
        assert "worker" not in stored
        assert await pending(redis, keys) == 1
        await scripts.register("w1.bbbb")
        again = (await scripts.take("w1.bbbb", Demand(9))).entries
        assert [(entry.request_id, entry.solo) for entry in again] == [("b", True), ("c", False), ("later", False)]
        assert [reply.attempt for reply in await scripts.claim("w1.bbbb", again)] == [3, 1, 1]
        assert await scripts.emit(WORKER, 1, [frame(entry, b"Z") for entry in entries], []) == ["b", "c"]

    async def test_request_has_larger_entry_id_each_time(self, scripts, redis, keys):
        """Streams number entries independently, and can give equal ids within a millisecond."""
        for queue in (keys.queue("interactive"), keys.queue(RESUMED)):  # their next id is the same
            await redis.xadd(queue, {"r": "first"}, id="9999999999999-7")
            await redis.xdel(queue, "9999999999999-7")
        entries = await start(scripts, "a", "b")
        entry_ids = [entries]
        for _ in range(2):
            assert await scripts.unclaim(WORKER, entry_ids[-1]) == 2
            entry_ids.append(await continue_with(scripts, WORKER))
        for name in range(2):
            assert len({taken[name].entry_id for taken in entry_ids}) == 3
        old = [frame(entry, b"Z") for entry in entry_ids[0]]
        assert await scripts.emit(WORKER, 1, old, []) == ["a", "b"]
        assert await scripts.emit(WORKER, 2, [frame(entry, b"Z") for entry in entry_ids[-1]], []) == []

    async def test_unclaim_fenced_worker_changes_nothing(self, scripts, redis, keys):
        """Other workers already have its requests."""
        entries = await start(scripts, "a")
        await reap_worker(scripts, WORKER)
        with pytest.raises(Fenced):
            await scripts.unclaim(WORKER, entries)
        assert (await queued(redis, keys), await pending(redis, keys)) == (1, 0)

    async def test_unclaim_foreign_or_ended_request_drops_only_entry(self, scripts, redis, keys):
        gone, accepted_again = await start(scripts, "gone", "accepted again")
        await scripts.cancel("gone", "interactive")
        await scripts.cancel("accepted again", "interactive")
        await accept(scripts, "accepted again")
        await scripts.register("w1.bbbb")
        (second,) = await continue_with(scripts, "w1.bbbb")
        assert await scripts.unclaim(WORKER, [gone, accepted_again]) == 0
        assert await scripts.unclaim(WORKER, [second]) == 0  # pending for the other worker
        assert (await queued(redis, keys), await pending(redis, keys)) == (1, 1)
        assert await scripts.emit("w1.bbbb", 1, [frame(second, b"A")], []) == []

    async def test_unclaimed_request_can_be_cancelled(self, scripts, redis, keys):
        entries = await start(scripts, "a", "b")
        assert not await scripts.cancel("b", "interactive", only_unstarted=True)
        await scripts.unclaim(WORKER, entries)
        assert await scripts.cancel("a", "interactive")
        assert await scripts.cancel("b", "interactive", only_unstarted=True)
        assert (await queued(redis, keys), await pending(redis, keys)) == (0, 0)


class TestClaim:
    async def test_claim_returns_body_and_journal_keeps_entry_pending(self, scripts, redis, keys):
        await accept(scripts, journal=b"jjj")
        await scripts.register(WORKER)
        entries = (await scripts.take(WORKER, Demand(1))).entries
        for _ in range(2):
            (reply,) = await scripts.claim(WORKER, entries)
            assert reply is not None
            assert (reply.body, reply.journal, reply.gateway_id, reply.attempt) == (b"body-a", b"jjj", "g", 1)
        assert (await state(redis, keys))["worker"] == WORKER
        assert await pending(redis, keys) == 1

    async def test_claim_cancelled_finished_or_broken_returns_none(self, scripts, redis, keys):
        entries = await start(scripts, "done", "missing", "wrong type", "no body", "odd journal", "running")
        await redis.hset(keys.request("done"), "state", "done")
        await redis.delete(keys.request("missing"), keys.request("wrong type"))
        await redis.set(keys.request("wrong type"), "x")
        await redis.hdel(keys.request("no body"), "body")
        await redis.lpush(keys.journal("odd journal"), "x")
        assert [reply is not None for reply in await scripts.claim(WORKER, entries)] == [False] * 5 + [True]

    async def test_claim_entry_of_earlier_acceptance_is_refused(self, scripts, redis, keys):
        await accept(scripts, "a")
        await scripts.register(WORKER)
        await scripts.register("w1.bbbb")
        first = (await scripts.take("w1.bbbb", Demand(1))).entries
        await scripts.cancel("a", "interactive")
        await accept(scripts, "a")
        second = (await scripts.take(WORKER, Demand(1))).entries
        assert await scripts.claim("w1.bbbb", first) == [None]
        assert (await scripts.claim(WORKER, second))[0] is not None
        assert await scripts.finish("w1.bbbb", [ending(first[0])], []) == 1
        assert await scripts.emit(WORKER, 1, [frame(second[0], b"A")], []) == []

    async def test_claim_fenced_worker_gets_nothing(self, scripts, redis, keys):
        await accept(scripts)
        await scripts.register(WORKER)
        entries = (await scripts.take(WORKER, Demand(1))).entries
        await redis.delete(keys.fence(WORKER))
        with pytest.raises(Fenced):
            await scripts.claim(WORKER, entries)


class TestEmit:
    async def test_emit_journals_and_publishes_once_per_step(self, scripts, redis, keys, connections):
        a, b = await start(scripts, "a", "b")
        async with connections.subscriber.pubsub() as channel:
            await channel.subscribe(keys.gateway_channel("g"))
            await channel.get_message(timeout=PATIENCE_SECONDS)
            for _ in range(3):
                assert await scripts.emit(WORKER, 1, [frame(a, b"A"), frame(b, b"B")], [message(b"blob1")]) == []
            await scripts.emit(WORKER, 2, [frame(a, b"C")], [message(b"blob2")])
            received = [(await channel.get_message(timeout=PATIENCE_SECONDS))["data"] for _ in range(2)]
            assert received == [b"blob1", b"blob2"]
        assert await redis.mget(keys.journal("a"), keys.journal("b")) == [b"AC", b"B"]

    async def test_emit_without_fence_writes_nothing(self, scripts, redis, keys):
        (a,) = await start(scripts, "a")
        await redis.delete(keys.fence(WORKER))
        with pytest.raises(Fenced):
            await scripts.emit(WORKER, 1, [frame(a, b"A")], [])
        assert await redis.get(keys.journal("a")) is None

    @pytest.mark.parametrize("step", [0, 2, 4, 5])
    async def test_emit_step_out_of_order_is_refused(self, scripts, redis, keys, step):
        (a,) = await start(scripts, "a")
        for applied in (1, 2, 3):
            await scripts.emit(WORKER, applied, [frame(a, b"A")], [])
        if step == 4:
            assert await scripts.emit(WORKER, step, [frame(a, b"B")], []) == []
            return
        with pytest.raises(Fenced, match="has step 3"):
            await scripts.emit(WORKER, step, [frame(a, b"B")], [])
        assert await redis.get(keys.journal("a")) == b"AAA"

    async def test_emit_repeated_reports_cancelled_requests_again(self, scripts, redis, keys):
        a, b, c = await start(scripts, "a", "b", "c")
        await scripts.cancel("b", "interactive")
        frames = [frame(a, b"A"), frame(b, b"B"), frame(c, b"C")]
        assert await scripts.emit(WORKER, 1, frames, []) == ["b"]
        assert await scripts.emit(WORKER, 1, frames, []) == ["b"]
        assert await redis.mget(*(keys.journal(name) for name in "abc")) == [b"A", None, b"C"]

    async def test_emit_request_accepted_again_is_reported_lost(self, scripts, redis, keys):
        (a,) = await start(scripts, "a")
        await redis.delete(keys.request("a"))  # the store lost the request but not the fence
        await accept(scripts, "a")
        assert await scripts.emit(WORKER, 1, [frame(a, b"A")], []) == ["a"]
        assert await redis.get(keys.journal("a")) is None

    async def test_emit_cancelled_retained_request_is_reported_lost(self, scripts, redis, keys):
        """Its hash stays. A worker that missed the cancel hint learns of the cancellation here."""
        await accept(scripts, terms=RetentionTerms(b"record", "h"))
        (a,) = await start(scripts)
        assert await scripts.cancel("a", "interactive", event=b"end")
        assert await scripts.emit(WORKER, 1, [frame(a, b"A")], []) == ["a"]
        assert await redis.get(keys.journal("a")) is None

    async def test_emit_after_cancel_by_old_version_accepts_new_claim(self, scripts, redis, keys):
        """The old version keeps the claim. The request of a disconnected gateway still continues in one attempt."""
        await accept(scripts, terms=RetentionTerms(b"record", "h"))
        (a,) = await start(scripts)
        assert await scripts.cancel("a", "interactive", gone_gateway_id="g", event=b"end")
        await redis.hset(keys.request("a"), "claim", WORKER.encode() + b" " + a.entry_id)
        assert await scripts.attach("a", "h", "g", again=True) is AttachStatus.QUEUED_AGAIN
        assert await scripts.emit(WORKER, 1, [frame(a, b"A")], []) == ["a"]
        (again,) = await continue_with(scripts, WORKER)
        assert await scripts.emit(WORKER, 2, [frame(again, b"B")], []) == []
        assert await redis.get(keys.journal("a")) == b"B"

    async def test_emit_journal_of_wrong_type_ends_only_its_request(self, scripts, redis, keys):
        a, b = await start(scripts, "a", "b")
        await redis.lpush(keys.journal("a"), "x")
        assert await scripts.emit(WORKER, 1, [frame(a, b"A"), frame(b, b"B")], []) == ["a"]
        assert await redis.get(keys.journal("b")) == b"B"

    @pytest.mark.parametrize("num_requests", [2, 15, 16, 17, 300])  # an array header has 1 or 3 bytes
    async def test_emit_publishes_nothing_of_lost_requests(self, scripts, redis, keys, connections, num_requests):
        ids = [f"r{number}" for number in range(num_requests)]
        entries = await continue_with_all(scripts, ids)
        lost = {"r0", ids[num_requests // 2], ids[-1]}
        for request_id in lost:
            await scripts.cancel(request_id, "interactive")
            await accept(scripts, request_id)
        async with connections.subscriber.pubsub() as channel:
            await channel.subscribe(keys.gateway_channel("g"))
            await channel.get_message(timeout=PATIENCE_SECONDS)
            frames = [frame(entry, b"A") for entry in entries]
            assert set(await scripts.emit(WORKER, 1, frames, [events_of(*ids, per_request=2)])) == lost
            await redis.publish(keys.gateway_channel("g"), b"after")
            data = (await channel.get_message(timeout=PATIENCE_SECONDS))["data"]
            if lost == set(ids):
                assert data == b"after"
                return
            batch = decode_event_batch(data)
        assert (batch.worker_id, batch.step) == (WORKER, 1)
        kept = [request_id for request_id in ids if request_id not in lost]
        assert [(event.request_id, event.index) for event in batch.events if isinstance(event, TokenEvent)] == [
            (request_id, index) for index in range(2) for request_id in kept
        ]

    async def test_emit_second_claim_gets_no_token_of_first(self, scripts, redis, keys):
        """An orphan ends, its gateway returns, and the same worker reads the new entry."""
        (first,) = await start(scripts, "a")
        await scripts.emit(WORKER, 1, [frame(first, b"old")], [])
        await scripts.cancel("a", "interactive")
        await accept(scripts, "a", journal=b"sent")
        (second,) = await continue_with(scripts, WORKER)
        assert await scripts.emit(WORKER, 2, [frame(first, b"old")], []) == ["a"]
        await scripts.finish(WORKER, [ending(first)], [])
        assert (await state(redis, keys))["state"] == "running"
        assert await scripts.emit(WORKER, 3, [frame(second, b"new")], []) == []
        assert await redis.get(keys.journal("a")) == b"sentnew"


def test_gateway_message_equals_encoded_event_batch():
    events: list[StreamEvent] = [TokenEvent(name, 0, list(range(9))) for name in ("a", "b") * 20]
    for count in (0, 1, 15, 16, 40):
        batch = gateway_message("g", "w", 3, events[:count], {"a": 0, "b": 1})
        assert batch.blob == encode(EventBatch(PROTOCOL_VERSION, "w", 3, events[:count]))


class TestFinish:
    async def test_finish_request_accepted_again_publishes_nothing(self, scripts, redis, keys, connections):
        """The gateway would take the end of the old attempt for that of the new one."""
        a, b = await start(scripts, "a", "b")
        await scripts.cancel("a", "interactive")
        await accept(scripts, "a")
        async with connections.subscriber.pubsub() as channel:
            await channel.subscribe(keys.gateway_channel("g"))
            await channel.get_message(timeout=PATIENCE_SECONDS)
            assert await scripts.finish(WORKER, [ending(a), ending(b)], [events_of("a", "b")]) == 2
            events = decode_event_batch((await channel.get_message(timeout=PATIENCE_SECONDS))["data"]).events
        assert [event.request_id for event in events] == ["b"]
        assert (await state(redis, keys, "a"))["state"] == "queued"
        assert (await state(redis, keys, "b"))["state"] == "done"

    async def test_finish_repeated_stores_and_publishes_end_once(self, scripts, redis, keys, connections):
        (entry,) = await start(scripts, "a")
        await scripts.emit(WORKER, 1, [frame(entry, b"A")], [])
        the_end = ending(entry, b"the end")
        async with connections.subscriber.pubsub() as channel:
            await channel.subscribe(keys.gateway_channel("g"))
            await channel.get_message(timeout=PATIENCE_SECONDS)
            batch = events_of("a")
            assert [await scripts.finish(WORKER, [the_end], [batch]) for _ in range(3)] == [1, 0, 0]
            assert (await channel.get_message(timeout=PATIENCE_SECONDS))["data"] == batch.blob
            await connections.commands.publish(keys.gateway_channel("g"), b"after")
            assert (await channel.get_message(timeout=PATIENCE_SECONDS))["data"] == b"after"
        stored = await state(redis, keys)
        assert (stored["state"], stored["terminal"]) == ("done", "the end")
        assert await redis.get(keys.journal("a")) == b"A"
        assert 0 < await redis.ttl(keys.request("a")) <= 600
        assert 0 < await redis.ttl(keys.journal("a")) <= 600
        assert (await pending(redis, keys), await queued(redis, keys)) == (0, 0)

    async def test_finish_cancelled_request_only_acknowledges(self, scripts, redis, keys):
        (entry,) = await start(scripts, "a")
        await scripts.cancel("a", "interactive")
        await redis.set(keys.journal("a"), b"left over")
        assert await scripts.finish(WORKER, [ending(entry)], []) == 1
        assert await redis.exists(keys.request("a"), keys.journal("a")) == 0
        assert (await pending(redis, keys), await queued(redis, keys)) == (0, 0)

    async def test_finish_fenced_worker_ends_nothing(self, scripts, redis, keys):
        (entry,) = await start(scripts, "a")
        await redis.delete(keys.fence(WORKER))
        with pytest.raises(Fenced):
            await scripts.finish(WORKER, [ending(entry)], [])
        assert await pending(redis, keys) == 1

    async def test_finish_keeps_the_entry_of_a_lost_claim(self, scripts, redis, keys):
        """A replica that lacks the CLAIM was promoted: EMIT reports the request as lost, and the worker gives it up."""
        (entry,) = await start(scripts, "a")
        await redis.hdel(keys.request("a"), "worker", "claim")
        await redis.hset(keys.request("a"), "state", "queued")
        assert await scripts.emit(WORKER, 1, [frame(entry, b"A")], []) == ["a"]
        assert await scripts.finish(WORKER, [ending(entry)], []) == 0
        assert (await state(redis, keys))["state"] == "queued"
        assert await pending(redis, keys) == 1

    async def test_finish_of_a_gone_request_that_came_back_ends_nothing(self, scripts, redis, keys):
        """CLAIM found no request, and a replica that lacks its cancellation was promoted."""
        (entry,) = await start(scripts, "a")
        assert await scripts.finish(WORKER, [Ending("a", entry.queue, entry.entry_id)], []) == 0
        assert (await state(redis, keys))["state"] == "running"
        assert await pending(redis, keys) == 1

    async def test_finish_without_the_last_step_ends_nothing(self, scripts, redis, keys):
        """A replica that lacks the last EMIT was promoted: the journal lacks the last tokens."""
        (entry,) = await start(scripts, "a")
        await scripts.emit(WORKER, 1, [frame(entry, b"A")], [])
        with pytest.raises(Fenced, match="has step 1, expected 2"):
            await scripts.finish(WORKER, [ending(entry)], [], step=2)
        assert (await state(redis, keys))["state"] == "running"
        assert await scripts.finish(WORKER, [ending(entry)], [], step=1) == 1


class TestLostDelivery:
    """A replica that lacks a TAKE was promoted, and the next TAKE gave the entry to another worker."""

    NEXT = "w1.bbbb"

    async def give_to_next(self, scripts: RedisScripts, redis: Redis, entry: QueueEntry) -> None:
        await scripts.register(self.NEXT)
        await redis.xclaim(entry.queue, GROUP, self.NEXT, 0, [entry.entry_id])

    async def test_claim_of_the_first_worker_is_refused(self, scripts, redis, keys):
        await accept(scripts, "a")
        await scripts.register(WORKER)
        (entry,) = (await scripts.take(WORKER, Demand(1))).entries
        await self.give_to_next(scripts, redis, entry)
        assert await scripts.claim(WORKER, [entry]) == [None]
        assert await scripts.finish(WORKER, [ending(entry, b"")], []) == 0
        assert [reply is not None for reply in await scripts.claim(self.NEXT, [entry])] == [True]

    async def test_first_worker_neither_writes_nor_ends_it(self, scripts, redis, keys):
        (entry,) = await start(scripts, "a")
        await self.give_to_next(scripts, redis, entry)
        await scripts.claim(self.NEXT, [entry])
        assert await scripts.emit(WORKER, 1, [frame(entry, b"A")], []) == ["a"]
        assert await scripts.finish(WORKER, [ending(entry)], [], step=1) == 0
        assert await scripts.unclaim(WORKER, [entry]) == 0
        assert await scripts.emit(self.NEXT, 1, [frame(entry, b"B")], []) == []
        assert await scripts.finish(self.NEXT, [ending(entry)], [], step=1) == 1
        assert await redis.get(keys.journal("a")) == b"B"

    async def test_first_worker_does_not_end_it_before_the_next_claims_it(self, scripts, redis, keys):
        (entry,) = await start(scripts, "a")
        await self.give_to_next(scripts, redis, entry)
        assert await scripts.finish(WORKER, [ending(entry)], []) == 0
        assert (await state(redis, keys))["state"] == "running"


class TestCancel:
    async def test_cancel_unread_request_leaves_nothing(self, scripts, redis, keys):
        await scripts.register(WORKER)
        await accept(scripts, "a")
        await accept(scripts, "b")
        assert [await scripts.cancel("a", "interactive") for _ in range(2)] == [True, False]
        assert [entry.request_id for entry in (await scripts.take(WORKER, Demand(10))).entries] == ["b"]
        assert await redis.exists(keys.request("a")) == 0

    async def test_cancel_before_group_exists_removes_entry(self, scripts, redis, keys):
        await accept(scripts, "a")
        assert await scripts.cancel("a", "interactive")
        assert await queued(redis, keys) == 0

    async def test_cancel_request_waiting_for_resume_leaves_nothing(self, scripts, redis, keys):
        await start(scripts, "a")
        await reap_worker(scripts, WORKER)
        assert await redis.xlen(keys.queue(RESUMED)) == 1
        assert await scripts.cancel("a", "interactive")
        assert await queued(redis, keys) == 0

    async def test_cancel_read_unclaimed_entry_stays_pending(self, scripts, redis, keys):
        await accept(scripts, "a")
        await scripts.register(WORKER)
        entries = (await scripts.take(WORKER, Demand(1))).entries
        await scripts.cancel("a", "interactive")
        assert (await pending(redis, keys), await queued(redis, keys)) == (1, 1)
        assert await scripts.claim(WORKER, entries) == [None]

    async def test_cancel_running_request_hints_its_worker(self, scripts, keys, connections):
        await start(scripts, "a")
        async with connections.subscriber.pubsub() as channel:
            await channel.subscribe(keys.control_channel(WORKER))
            await channel.get_message(timeout=PATIENCE_SECONDS)
            await scripts.cancel("a", "interactive")
            assert (await channel.get_message(timeout=PATIENCE_SECONDS))["data"] == b"a"

    async def test_cancel_keeps_entry_of_another_request(self, scripts, redis, keys):
        entry_id = await redis.xadd(keys.queue("interactive"), {"r": "b", "s": "0"})
        await redis.hset(keys.request("a"), mapping={"body": "x", "state": "queued", "entry": entry_id})
        await scripts.cancel("a", "interactive")
        assert await redis.xlen(keys.queue("interactive")) == 1

    async def test_cancel_after_end_keeps_the_response(self, scripts, redis, keys):
        (entry,) = await start(scripts, "a")
        await scripts.finish(WORKER, [ending(entry)], [])
        assert await scripts.cancel("a", "interactive") is False
        assert (await state(redis, keys))["terminal"] == "end"


class TestOrphanedAndHeldAgain:
    async def orphaned(self, scripts) -> None:
        """Start a request, journal two tokens, and end it because its gateway seems to be gone."""
        await accept(scripts, terms=RetentionTerms(b"record", "h"))
        await scripts.register(WORKER)
        (entry,) = await continue_with(scripts, WORKER)
        await scripts.emit(WORKER, 1, [StepFrame("a", entry.entry_id, b"xx")], [])
        assert await scripts.cancel("a", "interactive", gone_gateway_id="g", event=b"end")
        await scripts.finish(WORKER, [Ending("a", entry.queue, entry.entry_id)], [])

    async def test_attach_orphan_is_requeued_once_with_journal(self, scripts, redis, keys):
        await self.orphaned(scripts)
        assert await redis.ttl(keys.request("a")) > 0
        replies = [await scripts.attach("a", "h", "g", again=True) for _ in range(3)]
        assert replies == [AttachStatus.QUEUED_AGAIN, AttachStatus.HELD, AttachStatus.HELD]
        assert [await redis.ttl(key) for key in (keys.request("a"), keys.journal("a"))] == [-1, -1]
        assert [await redis.xlen(queue) for queue in keys.queues] == [1, 0, 0, 0]
        stored = await state(redis, keys)
        assert (stored["state"], stored["h:h"], stored["gateway"], stored["jl"]) == ("queued", "g", "g", "2")
        assert not {"terminal", "worker", "orphaned"} & stored.keys()
        (entry,) = (await scripts.take(WORKER, Demand(9))).entries
        (reply,) = await scripts.claim(WORKER, [entry])
        assert reply.journal == b"xx"

    async def test_attach_orphan_by_new_holder_finds_it_ended(self, scripts, redis, keys):
        await self.orphaned(scripts)
        assert await scripts.attach("a", "late", "g2") is AttachStatus.ENDED
        assert (await state(redis, keys))["state"] == "done"

    async def test_attach_orphan_cancelled_meanwhile_stays_ended(self, scripts, redis, keys):
        await self.orphaned(scripts)
        await scripts.cancel("a", "interactive", holder="other")  # releases a request that it does not hold
        await scripts.cancel("a", "interactive", only_unstarted=True)
        assert "orphaned" in await state(redis, keys)
        await scripts.cancel("a", "interactive")
        assert await scripts.attach("a", "h", "g", again=True) is AttachStatus.ENDED
        assert await queued(redis, keys) == 0

    async def test_attach_released_request_stays_ended(self, scripts, redis, keys):
        await accept(scripts, terms=RetentionTerms(b"record", "h"))
        await scripts.cancel("a", "interactive", holder="h", event=b"end")  # its last holder releases it
        assert await scripts.attach("a", "h", "g", again=True) is AttachStatus.ENDED


class TestReap:
    async def test_reap_requeues_first_and_fences_worker(self, scripts, redis, keys):
        (entry,) = await start(scripts, "a")
        await scripts.emit(WORKER, 1, [frame(entry, b"A")], [])
        await accept(scripts, "later")
        assert await reap_worker(scripts, WORKER) == ReapSummary(requeued=1)
        assert await reap_worker(scripts, WORKER) == ReapSummary()
        assert await list_worker_ids(redis, keys) == []
        for call in (
            scripts.emit(WORKER, 2, [frame(entry, b"Z")], [message(b"z")]),
            scripts.finish(WORKER, [ending(entry)], []),
            scripts.claim(WORKER, [entry]),
            scripts.take(WORKER, Demand(1)),
        ):
            with pytest.raises(Fenced):
                await call
        await scripts.register("w1.bbbb")
        assert [taken.request_id for taken in await continue_with(scripts, "w1.bbbb")] == ["a", "later"]
        stored = await state(redis, keys)
        assert (stored["attempt"], stored["strikes"], stored["jl"], stored["worker"]) == ("2", "0", "1", "w1.bbbb")

    async def test_reap_entry_of_earlier_acceptance_is_dropped(self, scripts, redis, keys):
        await start(scripts, "a", worker_id="w1.bbbb")
        await scripts.cancel("a", "interactive")
        (entry,) = await start(scripts, "a")
        assert await reap_worker(scripts, "w1.bbbb") == ReapSummary(dropped=1)
        assert await scripts.emit(WORKER, 1, [frame(entry, b"A")], []) == []
        assert (await queued(redis, keys), await pending(redis, keys)) == (1, 1)

    async def test_reap_handles_more_entries_than_one_batch(self, scripts, redis, keys):
        ids = [f"r{number}" for number in range(90)]
        await accept(scripts, "of another class", priority_class="batch")
        await start(scripts, *ids)
        assert await reap_worker(scripts, WORKER) == ReapSummary(requeued=91)
        assert await redis.xlen(keys.queue(RESUMED)) == 91
        assert await pending(redis, keys) == 0

    async def test_reap_unstarted_request_counts_no_attempt(self, scripts, redis, keys):
        await accept(scripts, "a")
        await scripts.register(WORKER)
        await scripts.take(WORKER, Demand(1))
        await reap_worker(scripts, WORKER)
        stored = await state(redis, keys)
        assert (stored["attempt"], stored["strikes"]) == ("1", "0")

    async def test_reap_drain_counts_no_attempt(self, scripts, redis, keys):
        await start(scripts, "a")
        assert await reap_worker(scripts, WORKER, ReapMode.DRAIN) == ReapSummary(requeued=1)
        stored = await state(redis, keys)
        assert (stored["attempt"], stored["strikes"]) == ("1", "0")

    async def test_reap_cancelled_requests_are_dropped(self, scripts, redis, keys):
        await start(scripts, "a", "b")
        await scripts.cancel("a", "interactive")
        assert await reap_worker(scripts, WORKER) == ReapSummary(requeued=1, dropped=1)
        assert await queued(redis, keys) == 1

    async def test_reap_deleted_entry_is_cleared(self, scripts, redis, keys):
        (entry,) = await start(scripts, "a")
        await redis.xdel(entry.queue, entry.entry_id)
        assert await reap_worker(scripts, WORKER) == ReapSummary(dropped=1)
        assert await pending(redis, keys) == 0

    async def test_reap_third_prefill_crash_makes_dead_letter(self, scripts, redis, keys, connections):
        await accept(scripts, "poison")
        async with connections.subscriber.pubsub() as channel:
            await channel.subscribe(keys.gateway_channel("g"))
            await channel.get_message(timeout=PATIENCE_SECONDS)
            solo, summaries = [], []
            for life in range(3):
                worker_id = f"w.{life}"
                (entry,) = await start(scripts, worker_id=worker_id)
                solo.append(entry.solo)
                summaries.append(await reap_worker(scripts, worker_id))
            (event,) = decode_event_batch((await channel.get_message(timeout=PATIENCE_SECONDS))["data"]).events
        assert solo == [False, False, True]
        assert summaries == [ReapSummary(requeued=1)] * 2 + [ReapSummary(dead_letters=1)]
        assert isinstance(event, ErrorEvent) and (event.request_id, event.code) == ("poison", "request_failed")
        stored = await redis.hget(keys.request("poison"), "terminal")
        assert decode_terminal_event(stored) == event
        ((_, letter),) = await redis.xrange(keys.dead_letters)
        assert (letter[b"r"], letter[b"attempts"], letter[b"strikes"]) == (b"poison", b"3", b"3")
        assert b"body-poison" not in letter.values()
        assert (await queued(redis, keys), await pending(redis, keys)) == (0, 0)

    async def test_reap_crash_after_tokens_gets_four_attempts(self, scripts, redis, keys):
        await accept(scripts, "poison")
        lives = 0
        while await queued(redis, keys):
            worker_id = f"w.{lives}"
            (entry,) = await start(scripts, worker_id=worker_id)
            if lives == 0:
                await scripts.emit(worker_id, 1, [frame(entry, b"fifty tokens")], [])
            await reap_worker(scripts, worker_id)
            lives += 1
        assert lives == 4

    async def test_reap_progress_is_no_crash_but_attempts_are_limited(self, scripts, redis, keys):
        await accept(scripts, "a")
        lives = 0
        while await queued(redis, keys):
            worker_id = f"w.{lives}"
            (entry,) = await start(scripts, worker_id=worker_id)
            await scripts.emit(worker_id, 1, [frame(entry, b"x")], [])
            await reap_worker(scripts, worker_id)
            lives += 1
        assert lives == 10
        assert (await state(redis, keys))["strikes"] == "0"

    async def test_reap_prefix_reaps_all_incarnations_of_one_worker(self, scripts, redis, keys):
        await accept(scripts, "a")
        for worker_id in ("w1.aa", "w1.bb", "w10.cc"):
            await scripts.register(worker_id)
        await continue_with(scripts, "w1.bb")
        reaped = await reap_workers_with_prefix(redis, keys, "w1")
        assert reaped == {"w1.aa": ReapSummary(), "w1.bb": ReapSummary(requeued=1)}
        assert await list_worker_ids(redis, keys) == ["w10.cc"]

    async def test_list_worker_ids_empty_store_has_none(self, redis, keys):
        assert await list_worker_ids(redis, keys) == []
        assert await reap_workers_with_prefix(redis, keys, "w1") == {}


async def test_scripts_are_reloaded_after_script_flush(scripts, redis):
    assert await accept(scripts, "a") is AcceptStatus.OK
    await redis.script_flush()
    assert await accept(scripts, "a") is AcceptStatus.DUP


async def test_full_store_refuses_scripts_and_still_finishes(scripts, redis, keys):
    (entry,) = await start(scripts, "a")
    used = (await redis.info("memory"))["used_memory"]
    await redis.config_set("maxmemory", used // 2)
    try:
        for refused in (accept(scripts, "b"), scripts.emit(WORKER, 1, [frame(entry, b"A")], [message(b"blob")])):
            with pytest.raises(Exception, match=r"OOM|maxmemory"):
                await refused
        assert await redis.get(keys.fence(WORKER)) == b"0"  # the step was not applied and can be repeated
        assert await scripts.finish(WORKER, [ending(entry)], []) == 1
    finally:
        await redis.config_set("maxmemory", 0)
    assert await redis.exists(keys.request("b"), keys.journal("a")) == 0
    assert (await state(redis, keys))["state"] == "done"
