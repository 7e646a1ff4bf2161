"""Claims on a real server: order, lost replies, suspects that run alone, and unreadable entries."""

import asyncio
from typing import Any

import pytest
from redis.exceptions import ResponseError

from engine_worker.transport.patience import PATIENCE_SECONDS
from engine_worker.transport.request_stream import REREAD_SECONDS, RequestStream
from engine_worker.transport.worker_profile import WorkerProfile
from shared.capabilities import Abilities, was_refused_as_unreadable
from shared.messages import (
    ErrorEvent,
    FinishEvent,
    FinishReason,
    JournalFrame,
    StoredChoice,
    Usage,
    decode_terminal_event,
    encode,
    encode_request,
)
from shared.new_requests import NewRequest
from shared.reaping import reap_worker
from shared.redis_client import BLOCK_SECONDS, connect
from shared.redis_keys import GROUP, NEWER, RESUMED
from shared.redis_scripts import Demand, Fenced
from tests.engine_worker.transport.rig import WORKER, Rig, make_request


def finished(request_id: str) -> FinishEvent:
    return FinishEvent(request_id, FinishReason.STOP, Usage(prompt_tokens=3, completion_tokens=0))


async def entries_left(rig: Rig) -> tuple[int, int]:
    queued = sum([await rig.redis.xlen(queue) for queue in rig.keys.queues])
    pending = sum([(await rig.redis.xpending(queue, GROUP))["pending"] for queue in rig.keys.queues])
    return queued, pending


async def requeue_as_suspect(rig: Rig, request_id: str) -> None:
    await rig.accept(request_id)
    for life in range(2):
        worker_id = f"victim.{life}"
        await rig.scripts.register(worker_id)
        entries = (await rig.scripts.take(worker_id, Demand(1))).entries
        await rig.scripts.claim(worker_id, entries)
        await reap_worker(rig.scripts, worker_id)


async def test_claim_takes_up_to_max_in_priority_order(rig):
    await rig.accept("batch", priority_class="batch")
    await rig.accept("a", "b", "c")
    assert await rig.claim(2) == ["a", "b"]
    assert await rig.claim(0) == []
    assert await rig.claim(9) == ["c", "batch"]
    assert await rig.claim(9) == []


async def test_claim_returns_journal_of_earlier_attempts(rig):
    await rig.accept("a", journal=encode(JournalFrame(0, [7, 8])) + encode(JournalFrame(2, [9])))
    (claimed,) = await rig.requests.claim(Demand(1))
    assert claimed.request == make_request("a")
    assert (claimed.stored, claimed.gateway_id, claimed.attempt) == ([StoredChoice([7, 8, 9])], "g", 1)
    assert rig.claims.get("a") == claimed


async def test_claim_blocking_wakes_for_new_request(rig):
    waiting = asyncio.create_task(rig.requests.claim(Demand(4), block=True))
    while not (await rig.redis.info("clients"))["blocked_clients"]:
        await asyncio.sleep(0)
    await rig.accept("a")
    assert [claimed.request.request_id for claimed in await waiting] == ["a"]


async def test_claim_blocking_without_request_ends_at_a_tick(rig, monkeypatch):
    """All periodic work of an idle worker ends at the same tick, so that it wakes once."""
    loop = asyncio.get_running_loop()
    ends: list[float] = []

    async def xreadgroup(*_: object, block: int, **__: object) -> list[Any]:
        ends.append(loop.time() + block / 1000)
        return []

    monkeypatch.setattr(rig.requests._blocking, "xreadgroup", xreadgroup)
    for _ in range(3):
        assert await rig.requests.claim(Demand(4), block=True) == []
        await asyncio.sleep(0.03)  # so that claims begin at different times
    assert [end % BLOCK_SECONDS < 0.02 for end in ends] == [True] * 3


async def test_claim_lost_read_reply_is_found_in_pending_entries(rig):
    await rig.accept("a", "b")
    assert await rig.claim(1) == ["a"]
    rig.scripts.fail("take", "lose")
    assert await rig.claim() == []
    assert await rig.claim() == ["b"]  # without "a", which is already claimed
    assert rig.requests.faults.num_read_failures == 1


async def test_claim_lost_claim_reply_is_retried(rig):
    await rig.accept("a")
    rig.scripts.fail("claim", "lose")
    assert await rig.claim() == []
    assert await rig.claim() == ["a"]
    assert await rig.claim() == []


async def test_claim_entry_of_abandoned_read_is_found_in_time(rig):
    await rig.accept("a")
    await rig.redis.xreadgroup(GROUP, WORKER, {rig.keys.queue("interactive"): ">"})
    assert await rig.claim() == []
    rig.clock.now += REREAD_SECONDS
    assert await rig.claim() == ["a"]


async def test_claim_cancelled_entries_are_acknowledged(rig):
    await rig.accept("a", "b")
    await rig.redis.delete(rig.keys.request("a"))
    assert await rig.claim() == ["b"]
    assert await entries_left(rig) == (1, 1)


@pytest.mark.parametrize(
    ("field", "broken"),
    [("body", b"\xc1"), ("body", encode(make_request("another"))), ("journal", encode(JournalFrame(5, [1])))],
    ids=["not_a_message", "another_request", "journal_with_a_gap"],
)
async def test_claim_unreadable_request_ends_with_error(rig, heard, field, broken):
    await rig.accept("bad", "good")
    if field == "body":
        await rig.redis.hset(rig.keys.request("bad"), "body", broken)
    else:
        await rig.redis.set(rig.keys.journal("bad"), broken)
    async with heard(rig.keys.gateway_channel("g")) as channel:
        assert await rig.claim() == ["good"]
        assert b"unreadable" in await channel.next()
    state, terminal = await rig.stored("bad", "state", "terminal")
    assert state == b"done"
    end = decode_terminal_event(terminal)
    assert isinstance(end, ErrorEvent) and end.code == "request_failed"
    assert await entries_left(rig) == (1, 1)


async def test_claim_suspect_runs_alone(rig):
    await rig.accept("a")
    assert await rig.claim() == ["a"]
    await requeue_as_suspect(rig, "suspect")
    await rig.accept("later")
    assert await rig.claim() == []  # "a" still runs, and the suspect must run alone
    await rig.tokens.finish([finished("a")])
    assert await rig.claim() == ["suspect"]
    assert await rig.claim() == []
    await rig.tokens.finish([finished("suspect")])
    assert await rig.claim() == ["later"]


async def test_claim_blocking_waits_for_end_of_suspect(rig):
    await requeue_as_suspect(rig, "suspect")
    assert await rig.claim() == ["suspect"]
    await rig.accept("later")
    waiting = asyncio.create_task(rig.requests.claim(Demand(1), block=True))
    await asyncio.sleep(0)
    await rig.tokens.finish([finished("suspect")])
    assert await waiting == []
    assert await rig.claim() == ["later"]


async def test_claim_waiting_suspect_in_dead_worker_is_not_counted(rig):
    await rig.accept("a")
    await rig.claim()
    await requeue_as_suspect(rig, "suspect")
    await rig.claim()
    await reap_worker(rig.scripts, WORKER)
    assert await rig.stored("suspect", "strikes", "state") == [b"2", b"queued"]


async def test_claim_without_fence_or_queues_is_fenced(rig):
    await rig.redis.delete(rig.keys.fence(WORKER))
    with pytest.raises(Fenced):
        await rig.requests.claim(Demand(1))
    await rig.redis.flushall()
    with pytest.raises(Fenced):
        await rig.requests.claim(Demand(1))
    await rig.scripts.register(WORKER)
    await rig.redis.delete(*rig.keys.queues)
    with pytest.raises(Fenced, match="lost its queues"):
        await rig.requests.claim(Demand(1))


async def test_claim_store_away_returns_nothing_own_error_raises(rig, tmp_path):
    away = connect(f"unix://{tmp_path}/no-server")
    try:
        rig_away = Rig(away, rig.keys)
        assert await rig_away.requests.claim(Demand(1)) == []
        assert rig_away.requests.faults.num_read_failures == 1
    finally:
        await away.aclose()
    await rig.redis.set(rig.keys.queue(RESUMED), "not a stream")
    with pytest.raises(ResponseError, match="WRONGTYPE"):
        await rig.requests.claim(Demand(1))


async def test_hand_back_requeues_without_counting_attempt(rig):
    await rig.accept("a", "b")
    await rig.claim(1)
    assert (await rig.requests.hand_back()).requeued == 1
    assert await rig.stored("a", "attempt", "strikes", "state") == [b"1", b"0", b"queued"]
    with pytest.raises(Fenced):
        await rig.requests.claim(Demand(1))


async def test_claim_defers_to_idle_peer_until_patience_ends(rig):
    await rig.scripts.register("peer.1")
    await rig.scripts.take("peer.1", Demand(1, room=9))  # reports room and never calls again
    await rig.accept(*(f"r{number}" for number in range(9)))
    demand = Demand(9, room=9)
    claimed = [len(await rig.requests.claim(demand)) for _ in range(3)]
    assert claimed == [2, 0, 0]  # one quantum above the peer, which holds nothing
    rig.clock.now += PATIENCE_SECONDS
    assert [len(await rig.requests.claim(demand)) for _ in range(2)] == [2, 5]
    await rig.accept("next")
    assert len(await rig.requests.claim(demand)) == 1


async def test_claim_blocking_does_not_bypass_fair_dispatch(rig):
    await rig.accept("a", "b", "c")
    await rig.claim()
    await rig.scripts.register("peer.1")
    await rig.scripts.take("peer.1", Demand(1, room=9))
    assert await rig.requests.claim(Demand(5, room=9), block=True) == []  # the queue is empty
    await rig.accept("d")
    assert await rig.requests.claim(Demand(5, room=9), block=True) == []
    assert [entry.request_id for entry in (await rig.scripts.take("peer.1", Demand(1, room=9))).entries] == ["d"]


async def test_unclaim_lost_reply_still_removes_claims(rig):
    await rig.accept("a", "b", "c")
    await rig.claim()
    rig.scripts.fail("unclaim", "lose")
    await rig.requests.unclaim(["c", "b", "unknown"])
    assert rig.claims.get("b") is None and rig.requests.num_held == 1
    assert await rig.claim() == ["b", "c"]
    await rig.redis.delete(rig.keys.fence(WORKER))
    with pytest.raises(Fenced):
        await rig.requests.unclaim(["a"])


async def test_claim_second_entry_waits_for_end_of_first(rig):
    await rig.accept("a")
    assert await rig.claim() == ["a"]
    await rig.scripts.cancel("a", "interactive")
    await rig.accept("a", "b")
    assert await rig.claim() == ["b"]
    await rig.tokens.finish([finished("a")])
    assert await rig.claim() == ["a"]
    assert await rig.stored("a", "state") == [b"running"]


async def test_claim_blocking_passes_on_unsupported_request(rig: Rig) -> None:
    rig.requests = RequestStream(
        rig.connections,
        rig.scripts,
        WORKER,
        rig.claims,
        rig.clock,
        profile=WorkerProfile(abilities=Abilities(max_model_len=8)),
    )
    waiting = asyncio.create_task(rig.requests.claim(Demand(4), block=True))
    while not await blocked_readers(rig):
        await asyncio.sleep(0)
    new = NewRequest("long", encode(make_request("long")), num_prompt_tokens=3, context_tokens=9)
    await rig.scripts.accept_all([new], gateway_id="g", priority_class="interactive")
    assert await waiting == []
    assert await rig.redis.xlen(rig.keys.queue(NEWER)) == 1
    assert await rig.requests.claim(Demand(4), block=True) == []  # reads the other queues
    assert rig.scripts.calls.count("unclaim") == 1
    await rig.accept("short")
    assert await rig.claim() == ["short"]
    await rig.scripts.register("long.1")
    assert [entry.request_id for entry in (await rig.scripts.take("long.1", Demand(4))).entries] == ["long"]


async def blocked_readers(rig: Rig) -> int:
    clients: Any = await rig.redis.info("clients")
    return int(clients["blocked_clients"])


async def test_claim_unsupported_message_is_refused_as_unreadable(rig: Rig) -> None:
    body = encode_request(make_request("a"), 1 << 30)
    await rig.scripts.accept_all([NewRequest("a", body, needs=1)], gateway_id="g", priority_class="interactive")
    assert await rig.claim() == []
    (terminal,) = await rig.stored("a", "terminal")
    assert was_refused_as_unreadable(decode_terminal_event(terminal))
