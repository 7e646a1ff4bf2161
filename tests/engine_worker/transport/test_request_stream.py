"""Claiming on a real server: order, lost replies, suspects that run alone, entries that cannot run."""

import asyncio
from typing import Any

import pytest
from redis.exceptions import ResponseError

from engine_worker.transport.patience import PATIENCE_SECONDS
from engine_worker.transport.request_stream import REREAD_SECONDS, RequestStream
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


async def test_claims_up_to_the_number_in_strict_order(rig):
    await rig.accept("batch", priority_class="batch")
    await rig.accept("a", "b", "c")
    assert await rig.claim(2) == ["a", "b"]
    assert await rig.claim(0) == []
    assert await rig.claim(9) == ["c", "batch"]
    assert await rig.claim(9) == []


async def test_gives_the_journal_of_earlier_attempts(rig):
    await rig.accept("a", journal=encode(JournalFrame(0, [7, 8])) + encode(JournalFrame(2, [9])))
    (claimed,) = await rig.requests.claim(Demand(1))
    assert claimed.request == make_request("a")
    assert (claimed.stored, claimed.gateway_id, claimed.attempt) == ([StoredChoice([7, 8, 9])], "g", 1)
    assert rig.claims.get("a") == claimed


async def test_a_blocking_claim_wakes_up_for_a_new_request(rig):
    waiting = asyncio.create_task(rig.requests.claim(Demand(4), block=True))
    while not (await rig.redis.info("clients"))["blocked_clients"]:
        await asyncio.sleep(0)
    await rig.accept("a")
    assert [claimed.request.request_id for claimed in await waiting] == ["a"]


async def test_a_blocking_claim_that_finds_nothing_ends_at_a_tick(rig, monkeypatch):
    """With all else that an idle worker does: it wakes once for both."""
    loop = asyncio.get_running_loop()
    ends: list[float] = []

    async def xreadgroup(*_: object, block: int, **__: object) -> list[Any]:
        ends.append(loop.time() + block / 1000)
        return []

    monkeypatch.setattr(rig.requests._blocking, "xreadgroup", xreadgroup)
    for _ in range(3):
        assert await rig.requests.claim(Demand(4), block=True) == []
        await asyncio.sleep(0.03)  # so that they begin at different times
    assert [end % BLOCK_SECONDS < 0.02 for end in ends] == [True] * 3


async def test_a_lost_reply_of_a_read_is_found_in_the_own_pending_entries(rig):
    await rig.accept("a", "b")
    assert await rig.claim(1) == ["a"]
    rig.scripts.fail("take", "lose")
    assert await rig.claim() == []
    assert await rig.claim() == ["b"]  # and not "a" again
    assert rig.requests.faults.num_read_failures == 1


async def test_a_lost_reply_of_claim_is_asked_for_again(rig):
    await rig.accept("a")
    rig.scripts.fail("claim", "lose")
    assert await rig.claim() == []
    assert await rig.claim() == ["a"]
    assert await rig.claim() == []


async def test_an_entry_delivered_to_a_read_that_was_given_up_is_found_in_time(rig):
    await rig.accept("a")
    await rig.redis.xreadgroup(GROUP, WORKER, {rig.keys.queue("interactive"): ">"})
    assert await rig.claim() == []
    rig.clock.now += REREAD_SECONDS
    assert await rig.claim() == ["a"]


async def test_cancelled_entries_are_acknowledged_here(rig):
    await rig.accept("a", "b")
    await rig.redis.delete(rig.keys.request("a"))
    assert await rig.claim() == ["b"]
    assert await entries_left(rig) == (1, 1)


@pytest.mark.parametrize(
    ("field", "broken"),
    [("body", b"\xc1"), ("body", encode(make_request("another"))), ("journal", encode(JournalFrame(5, [1])))],
    ids=["not a message", "another request", "journal with a hole"],
)
async def test_an_unreadable_request_ends_alone_with_an_error(rig, heard, field, broken):
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


async def test_a_suspect_waits_until_nothing_else_runs_and_then_runs_alone(rig):
    await rig.accept("a")
    assert await rig.claim() == ["a"]
    await requeue_as_suspect(rig, "suspect")
    await rig.accept("later")
    assert await rig.claim() == []  # "a" still runs, and nothing new joins it
    await rig.tokens.finish([finished("a")])
    assert await rig.claim() == ["suspect"]
    assert await rig.claim() == []
    await rig.tokens.finish([finished("suspect")])
    assert await rig.claim() == ["later"]


async def test_a_blocking_claim_beside_a_suspect_waits_for_its_end(rig):
    await requeue_as_suspect(rig, "suspect")
    assert await rig.claim() == ["suspect"]
    await rig.accept("later")
    waiting = asyncio.create_task(rig.requests.claim(Demand(1), block=True))
    await asyncio.sleep(0)
    await rig.tokens.finish([finished("suspect")])
    assert await waiting == []
    assert await rig.claim() == ["later"]


async def test_a_suspect_that_waits_in_a_dying_worker_gets_no_strike(rig):
    await rig.accept("a")
    await rig.claim()
    await requeue_as_suspect(rig, "suspect")
    await rig.claim()
    await reap_worker(rig.scripts, WORKER)
    assert await rig.stored("suspect", "strikes", "state") == [b"2", b"queued"]


async def test_fenced_when_the_fence_or_the_store_is_gone(rig):
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


async def test_nothing_while_the_store_is_away_and_errors_of_ours_are_raised(rig, tmp_path):
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


async def test_handing_back_requeues_without_counting_an_attempt(rig):
    await rig.accept("a", "b")
    await rig.claim(1)
    assert (await rig.requests.hand_back()).requeued == 1
    assert await rig.stored("a", "attempt", "strikes", "state") == [b"1", b"0", b"queued"]
    with pytest.raises(Fenced):
        await rig.requests.claim(Demand(1))


async def test_it_lets_a_peer_that_holds_less_go_first_until_its_patience_is_over(rig):
    await rig.scripts.register("peer.1")
    await rig.scripts.take("peer.1", Demand(1, room=9))  # says that it has room, and is never heard again
    await rig.accept(*(f"r{number}" for number in range(9)))
    demand = Demand(9, room=9)
    claimed = [len(await rig.requests.claim(demand)) for _ in range(3)]
    assert claimed == [2, 0, 0]  # a quantum above the peer, which holds nothing
    rig.clock.now += PATIENCE_SECONDS
    assert [len(await rig.requests.claim(demand)) for _ in range(2)] == [2, 5]
    await rig.accept("next")
    assert len(await rig.requests.claim(demand)) == 1


async def test_one_that_may_have_nothing_does_not_take_it_by_waiting(rig):
    await rig.accept("a", "b", "c")
    await rig.claim()
    await rig.scripts.register("peer.1")
    await rig.scripts.take("peer.1", Demand(1, room=9))
    assert await rig.requests.claim(Demand(5, room=9), block=True) == []  # nothing is there
    await rig.accept("d")
    assert await rig.requests.claim(Demand(5, room=9), block=True) == []
    assert [entry.request_id for entry in (await rig.scripts.take("peer.1", Demand(1, room=9))).entries] == ["d"]


async def test_what_is_given_back_is_gone_here_also_when_the_reply_was_lost(rig):
    await rig.accept("a", "b", "c")
    await rig.claim()
    rig.scripts.fail("unclaim", "lose")
    await rig.requests.unclaim(["c", "b", "unknown"])
    assert rig.claims.get("b") is None and rig.requests.num_held == 1
    assert await rig.claim() == ["b", "c"]
    await rig.redis.delete(rig.keys.fence(WORKER))
    with pytest.raises(Fenced):
        await rig.requests.unclaim(["a"])


async def test_a_second_entry_of_a_request_waits_for_the_end_of_the_first(rig):
    await rig.accept("a")
    assert await rig.claim() == ["a"]
    await rig.scripts.cancel("a", "interactive")
    await rig.accept("a", "b")
    assert await rig.claim() == ["b"]
    await rig.tokens.finish([finished("a")])
    assert await rig.claim() == ["a"]
    assert await rig.stored("a", "state") == [b"running"]


async def test_what_a_blocking_read_cannot_serve_is_passed_on(rig: Rig) -> None:
    rig.requests = RequestStream(
        rig.connections, rig.scripts, WORKER, rig.claims, rig.clock, abilities=Abilities(max_model_len=8)
    )
    waiting = asyncio.create_task(rig.requests.claim(Demand(4), block=True))
    while not await blocked_readers(rig):
        await asyncio.sleep(0)
    new = NewRequest("long", encode(make_request("long")), num_prompt_tokens=3, context_tokens=9)
    await rig.scripts.accept_all([new], gateway_id="g", priority_class="interactive")
    assert await waiting == []
    assert await rig.redis.xlen(rig.keys.queue(NEWER)) == 1
    assert await rig.requests.claim(Demand(4), block=True) == []  # waits for other queues
    assert rig.scripts.calls.count("unclaim") == 1
    await rig.accept("short")
    assert await rig.claim() == ["short"]
    await rig.scripts.register("long.1")
    assert [entry.request_id for entry in (await rig.scripts.take("long.1", Demand(4))).entries] == ["long"]


async def blocked_readers(rig: Rig) -> int:
    clients: Any = await rig.redis.info("clients")
    return int(clients["blocked_clients"])


async def test_a_body_that_needs_more_is_refused_as_unreadable(rig: Rig) -> None:
    body = encode_request(make_request("a"), 1 << 30)
    await rig.scripts.accept_all([NewRequest("a", body, needs=1)], gateway_id="g", priority_class="interactive")
    assert await rig.claim() == []
    (terminal,) = await rig.stored("a", "terminal")
    assert was_refused_as_unreadable(decode_terminal_event(terminal))
