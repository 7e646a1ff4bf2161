"""The token publisher: one script call per step, exactly-once with lost replies, and self-fencing in time."""

from typing import Any

import pytest
from redis.exceptions import ConnectionError, OutOfMemoryError, ResponseError

from engine_worker.transport.token_publisher import SELF_FENCE_SECONDS
from shared.messages import (
    ErrorCode,
    ErrorEvent,
    FinishEvent,
    FinishReason,
    TerminalEvent,
    TokenEvent,
    TokenLogprobs,
    Usage,
    decode_event_batch,
    decode_terminal_event,
    encoded_logprobs,
    journal_choices,
)
from shared.reaping import reap_worker
from shared.redis_scripts import Fenced
from tests.engine_worker.transport.rig import WORKER, Rig


def token(request_id: str, index: int, *token_ids: int) -> TokenEvent:
    return TokenEvent(request_id, index, list(token_ids))


def finish(request_id: str, completion_tokens: int, reason: FinishReason = FinishReason.STOP) -> FinishEvent:
    return FinishEvent(request_id, reason, Usage(prompt_tokens=3, completion_tokens=completion_tokens))


async def start(rig: Rig, *request_ids: str, **options: str) -> None:
    await rig.accept(*request_ids, **options)
    await rig.claim()
    rig.scripts.calls.clear()


async def journal(rig: Rig, request_id: str) -> list[int]:
    stored: Any = await rig.redis.get(rig.keys.journal(request_id))
    return journal_choices(stored or b"", 1)[0].token_ids


async def test_emit_one_call_per_step_one_message_per_gateway(rig, heard):
    ids = [f"r{number}" for number in range(50)]
    await rig.accept("other", gateway_id="h")
    await start(rig, *ids)
    async with heard(rig.keys.gateway_channel("g")) as g, heard(rig.keys.gateway_channel("h")) as h:
        events = [token(request_id, 0, number) for number, request_id in enumerate([*ids, "other"])]
        assert await rig.tokens.emit(events) == []
        assert rig.scripts.calls == ["emit"]
        batch = decode_event_batch(await g.next())
        assert (batch.worker_id, batch.step, batch.events) == (WORKER, 1, events[:-1])
        assert decode_event_batch(await h.next()).events == events[-1:]
    assert await journal(rig, "r49") == [49]


async def test_emit_logprobs_are_published_and_journaled(rig, heard):
    await start(rig, "a")
    logprobs = TokenLogprobs(-0.5, (1,), (-0.5,)), TokenLogprobs(-1.5, (7,), (-0.25,))
    event = TokenEvent("a", 0, [1, 2], logprobs=list(map(encoded_logprobs, logprobs)))
    async with heard(rig.keys.gateway_channel("g")) as messages:
        await rig.tokens.emit([event])
        assert decode_event_batch(await messages.next()).events == [event]
    await rig.tokens.emit([token("a", 2, 3)])
    (stored,) = journal_choices(await rig.redis.get(rig.keys.journal("a")), 1)
    assert (stored.token_ids, stored.logprobs) == ([1, 2, 3], dict(enumerate(event.logprobs or ())))


async def test_emit_lost_replies_and_refusals_change_nothing(rig):
    await start(rig, "a")
    rig.scripts.fail("emit", "lose", times=2)
    rig.scripts.fail("emit", "refuse")
    await rig.tokens.emit([token("a", 0, 1)])
    rig.scripts.fail("emit", "lose")
    await rig.tokens.emit([token("a", 1, 2, 3)])
    rig.scripts.fail("finish", "lose", times=2)
    await rig.tokens.finish([finish("a", 3)])
    assert await journal(rig, "a") == [1, 2, 3]
    assert await rig.redis.get(rig.keys.fence(WORKER)) == b"2"
    assert rig.tokens.faults.num_retries == 6
    assert rig.clock.sleeps == [0.1, 0.2, 0.4, 0.1, 0.1, 0.2]


async def test_emit_backoff_is_bounded(rig):
    await start(rig, "a")
    rig.scripts.fail("emit", "refuse", times=8, error=OutOfMemoryError("OOM"))
    await rig.tokens.emit([token("a", 0, 1)])
    assert rig.clock.sleeps == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.0, 1.0, 1.0, 1.0])


async def test_emit_lost_reply_still_reports_cancelled_requests(rig):
    await start(rig, "a", "b")
    await rig.scripts.cancel("a", "interactive")
    rig.scripts.fail("emit", "lose")
    assert await rig.tokens.emit([token("a", 0, 1), token("b", 0, 1)]) == ["a"]
    await rig.tokens.finish([finish("a", 0, FinishReason.CANCELLED)])
    assert rig.claims.get("a") is None
    assert await rig.redis.xlen(rig.keys.queue("interactive")) == 1
    assert await rig.redis.exists(rig.keys.request("a"), rig.keys.journal("a")) == 0


async def test_finish_stores_and_publishes_the_end(rig, heard):
    await start(rig, "a", "b")
    endings: list[TerminalEvent] = [finish("a", 0), ErrorEvent("b", ErrorCode.REQUEST_FAILED, "it broke")]
    async with heard(rig.keys.gateway_channel("g")) as channel:
        await rig.tokens.finish(endings)
        assert decode_event_batch(await channel.next()).events == endings
    for ending in endings:
        (terminal,) = await rig.stored(ending.request_id, "terminal")
        assert decode_terminal_event(terminal) == ending
    assert len(rig.claims) == 0


async def test_emit_ignores_events_of_unclaimed_requests(rig):
    await start(rig, "a")
    assert await rig.tokens.emit([token("stranger", 0, 1)]) == []
    await rig.tokens.finish([finish("stranger", 1)])
    await rig.tokens.emit([])
    assert rig.scripts.calls == []  # no step number was used
    await rig.tokens.emit([token("stranger", 0, 1), token("a", 0, 1)])
    assert await journal(rig, "a") == [1]
    assert await rig.redis.exists(rig.keys.journal("stranger")) == 0


async def test_emit_reaped_worker_publishes_nothing_and_is_fenced(rig):
    await start(rig, "a")
    await rig.tokens.emit([token("a", 0, 1)])
    await reap_worker(rig.scripts, WORKER)
    with pytest.raises(Fenced):
        await rig.tokens.emit([token("a", 1, 2)])
    rig.scripts.calls.clear()
    for call in (rig.tokens.emit([token("a", 1, 2)]), rig.tokens.finish([finish("a", 2)])):
        with pytest.raises(Fenced):
            await call
    assert rig.scripts.calls == []
    assert await journal(rig, "a") == [1]
    assert await rig.stored("a", "state") == [b"queued"]


async def test_emit_self_fences_after_ten_seconds_without_reply(rig):
    await start(rig, "a")
    rig.clock.now += 3600  # idle time does not count
    rig.scripts.fail("emit", "refuse", times=99, error=ConnectionError("refused"))
    started = rig.clock.now
    with pytest.raises(Fenced, match="no reply"):
        await rig.tokens.emit([token("a", 0, 1)])
    assert SELF_FENCE_SECONDS <= rig.clock.now - started < SELF_FENCE_SECONDS + 2.0


async def test_emit_waits_for_store_that_cannot_write(rig):
    await start(rig, "a")
    rig.scripts.fail("emit", "refuse", times=20, error=OutOfMemoryError("OOM"))
    rig.scripts.fail("emit", "refuse", times=20, error=ResponseError("MISCONF cannot write to disk"))
    rig.scripts.fail("emit", "refuse")  # no reply: the ten seconds start at the last answer
    await rig.tokens.emit([token("a", 0, 1)])
    assert rig.clock.now - 100 > 3 * SELF_FENCE_SECONDS
    assert await journal(rig, "a") == [1]


async def test_emit_unexpected_error_is_raised_at_once(rig):
    await start(rig, "a")
    rig.scripts.fail("emit", "refuse", error=ResponseError("WRONGTYPE"))
    with pytest.raises(ResponseError, match="WRONGTYPE"):
        await rig.tokens.emit([token("a", 0, 1)])
    assert rig.clock.sleeps == []
