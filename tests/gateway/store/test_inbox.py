"""A response stream delivers each index once, in order, and one end, for any sequence of events."""

import asyncio
import random
import sys
from collections.abc import Callable
from functools import partial

import pytest

from gateway.fleet import Fleet, ready_workers
from gateway.store import inbox
from gateway.store.inbox import MAX_READ_SCORES, TRANSITIONS, IllegalTransition, Inbox, StreamState, cancelled_event
from shared.messages import (
    PROTOCOL_VERSION,
    ErrorCode,
    ErrorEvent,
    EventBatch,
    FinishEvent,
    FinishReason,
    GenerationRequest,
    JournalExtras,
    JournalFrame,
    PromptLogprobs,
    SamplingParams,
    StoredChoice,
    StreamEvent,
    TokenEvent,
    TokenLogprobs,
    Usage,
    WorkerHeartbeat,
    WorkerPhase,
    decode_event_batch,
    encode,
    encoded_logprobs,
    journal_choices,
)
from shared.new_requests import RetentionTerms
from tests.inbox_reader import InboxReader
from tests.patience import PATIENCE_SECONDS

REQUEST = GenerationRequest(request_id="a", prompt_token_ids=[1, 2], sampling=SamplingParams(max_tokens=9, seed=0))
ERROR = ErrorEvent("a", ErrorCode.REQUEST_FAILED, "it broke")


def is_in(stream: Inbox, state: StreamState) -> bool:
    return stream.state is state


def token(index: int, *token_ids: int) -> TokenEvent:
    return TokenEvent("a", index, list(token_ids))


def finish(completion_tokens: int) -> FinishEvent:
    return FinishEvent("a", FinishReason.STOP, Usage(prompt_tokens=2, completion_tokens=completion_tokens))


def tokens_of(stream: Inbox) -> list[int]:
    return [token_id for frame in stream.frames for token_id in frame.token_ids]


async def everything(stream: Inbox) -> list[object]:
    async with asyncio.timeout(PATIENCE_SECONDS):
        return [event async for event in InboxReader(stream)]


async def test_read_joins_events_since_the_last_read():
    stream = Inbox(REQUEST)
    stream.add_event(token(0, 5))
    stream.add_event(token(1, 6, 7))
    assert await anext(InboxReader(stream)) == token(0, 5, 6, 7)
    stream.add_event(token(3, 8))
    stream.add_event(finish(4))
    assert await everything(stream) == [token(3, 8), finish(4)]
    assert await everything(stream) == []


async def test_event_that_waits_alone_is_read_unchanged() -> None:
    stream = Inbox(REQUEST)
    assert stream.read() is None
    event = token(0, 5, 6)
    stream.add_event(event)
    assert stream.read() is event and stream.read() is None
    batches: list[list[StreamEvent]] = [[token(2, 7), token(3, 8)], [scored(4, 9)], [token(5, 10), finish(6)]]
    for batch in batches:
        for other in batch:
            stream.add_event(other)
        assert stream.read() is not None
    assert stream.read() == finish(6)


async def test_event_of_an_unrequested_choice_is_ignored() -> None:
    stream = Inbox(REQUEST)
    stream.add_event(TokenEvent("a", 0, [5], choice=1))
    assert stream.read() is None and not stream.num_tokens


def scored(index: int, *token_ids: int) -> TokenEvent:
    logprobs = [encoded_logprobs(TokenLogprobs(-token_id, (), ())) for token_id in token_ids]
    return TokenEvent("a", index, list(token_ids), logprobs=logprobs)


async def test_logprobs_from_either_source_are_delivered_once():
    stream = Inbox(REQUEST, RetentionTerms(b"", "holder", "", 15))  # kept, so that others may read it again
    for event in (scored(0, 5), scored(0, 5, 6), scored(3, 8)):  # the last one follows a gap
        stream.add_event(event)
    assert await anext(InboxReader(stream)) == scored(0, 5, 6)
    journal = b"".join(encode(JournalFrame(e.index, e.token_ids, JournalExtras(e.logprobs))) for e in
                       (scored(0, 5, 6), scored(2, 7, 8)))  # fmt: skip
    stream.add_journal(journal_choices(journal, 1), None)
    assert await anext(InboxReader(stream)) == scored(2, 7, 8)
    # The frames that would restore a lost request have them too.
    assert journal_choices(encode(stream.frames[0]), 1) == journal_choices(journal, 1)


def scored_journal(*token_ids: int) -> list[StoredChoice]:
    return journal_choices(encode(JournalFrame(0, list(token_ids), JournalExtras(scored(0, *token_ids).logprobs))), 1)


async def test_lagging_reader_gets_the_rest_from_the_journal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inbox, "MAX_UNREAD_SCORES", 3)
    stream, caught_up = Inbox(REQUEST), []

    def catch_up(paused: Inbox) -> None:
        paused.lead()
        caught_up.append(paused.state)

    stream.on_caught_up = catch_up
    for event in (scored(0, 1, 2), scored(2, 3, 4), scored(4, 5), finish(5)):
        stream.add_event(event)
    assert is_in(stream, StreamState.PAUSED) and tokens_of(stream) == [1, 2, 3]
    assert stream.read() == scored(0, 1, 2, 3)
    assert caught_up == [StreamState.NEEDS_JOURNAL] and is_in(stream, StreamState.NEEDS_JOURNAL)
    stream.add_journal(scored_journal(1, 2, 3, 4, 5, 6, 7), finish(7))
    assert is_in(stream, StreamState.PAUSED) and stream.read() == scored(3, 4, 5, 6)
    stream.add_journal(scored_journal(1, 2, 3, 4, 5, 6, 7), finish(7))
    assert await everything(stream) == [scored(6, 7), finish(7)]
    assert caught_up == [StreamState.NEEDS_JOURNAL] * 2


async def test_fast_reader_gets_a_long_journal_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inbox, "MAX_UNREAD_SCORES", 3)
    stream, events = Inbox(REQUEST), []

    def read_all() -> None:
        while (event := stream.read()) is not None:
            events.append(event)

    stream.on_ready = read_all
    stream.add_journal(scored_journal(1, 2, 3, 4, 5, 6, 7), finish(7))
    assert events == [scored(0, 1, 2, 3), scored(3, 4, 5, 6), scored(6, 7), finish(7)]
    assert stream.has_ended


async def test_waiting_logprobs_do_not_hold_their_messages() -> None:
    """A slow reader would hold the data of all other requests in the same messages."""
    stream = Inbox(REQUEST)
    others = [TokenEvent("b", 0, [7] * 5_000)]
    messages = [encode(EventBatch(PROTOCOL_VERSION, "w", 1, [scored(index, 5), *others])) for index in range(3)]
    num_references = [sys.getrefcount(message) for message in messages]
    for number in range(3):
        stream.add_event(decode_event_batch(messages[number]).events[0])
    assert [sys.getrefcount(message) for message in messages] == num_references
    assert await anext(InboxReader(stream)) == scored(0, 5, 5, 5)


@pytest.mark.parametrize("terms", [None, RetentionTerms(b"", "holder", "", 15)])
async def test_logprobs_read_one_by_one_or_late_are_complete(
    terms: RetentionTerms | None,
) -> None:
    events = [scored(0, 5), scored(1, 6, 7), scored(3, 8), scored(4, *range(10, 10 + MAX_READ_SCORES))]
    for num_late in range(len(events) + 1):
        stream, found = Inbox(REQUEST, terms), list[TokenEvent]()
        for number, event in enumerate(events):
            stream.add_event(event)
            while number >= num_late and isinstance(event_read := stream.read(), TokenEvent):
                found.append(event_read)
        stream.add_event(finish(stream.num_tokens))
        found += [event for event in await everything(stream) if isinstance(event, TokenEvent)]
        assert [id_ for event_read in found for id_ in event_read.token_ids] == [
            id_ for event in events for id_ in event.token_ids
        ]
        assert [one for event_read in found for one in event_read.logprobs or ()] == [
            one for event in events for one in event.logprobs or ()
        ]


async def test_read_logprobs_are_freed() -> None:
    stream = Inbox(REQUEST)
    stream.add_event(scored(0, 5, 6))
    assert await anext(InboxReader(stream)) == scored(0, 5, 6)
    assert stream.frames == [JournalFrame(0, [5, 6])]


PROMPT_SCORES = [encoded_logprobs(TokenLogprobs(-float(place), (), ())) for place in (1, 2, 3)]


def prompt_scores(start: int, stop: int) -> PromptLogprobs:
    return PromptLogprobs(start, PROMPT_SCORES[start - 1 : stop - 1])


async def test_prompt_logprobs_are_complete_before_the_first_token():
    sampling = SamplingParams(max_tokens=9, seed=0, prompt_logprobs=0)
    stream = Inbox(GenerationRequest(request_id="a", prompt_token_ids=[1, 2, 3, 4], sampling=sampling))
    stream.add_event(TokenEvent("a", 0, [], prompt_logprobs=prompt_scores(1, 2)))
    stream.add_event(token(0, 5))  # the message in between was lost
    assert is_in(stream, StreamState.NEEDS_JOURNAL) and tokens_of(stream) == []
    frames = [JournalFrame(0, [], JournalExtras(prompt_logprobs=prompt_scores(*part))) for part in ((1, 2), (2, 4))]
    journal = b"".join(map(encode, [*frames, JournalFrame(0, [5])]))
    stream.add_journal(journal_choices(journal, 1), None)
    assert is_in(stream, StreamState.LIVE) and await anext(InboxReader(stream)) == token(0, 5)
    assert stream.prompt_logprobs == dict(enumerate(PROMPT_SCORES, 1))
    # The frames that would restore a lost request have them too.
    assert journal_choices(b"".join(map(encode, stream.frames)), 1) == journal_choices(journal, 1)


async def test_tokens_of_a_worker_without_prompt_logprobs_pass():
    sampling = SamplingParams(max_tokens=9, seed=0, prompt_logprobs=0)
    stream = Inbox(GenerationRequest(request_id="a", prompt_token_ids=[1, 2], sampling=sampling))
    stream.add_event(token(0, 5))
    assert is_in(stream, StreamState.NEEDS_JOURNAL)
    stream.add_journal(journal_choices(encode(JournalFrame(0, [5])), 1), finish(1))
    assert await everything(stream) == [token(0, 5), finish(1)]


async def test_repeated_and_overlapping_tokens_are_dropped():
    stream = Inbox(REQUEST)
    for event in (token(0, 5, 6), token(0, 5, 6), token(1, 6, 7), token(0, 5), finish(3)):
        stream.add_event(event)
    assert await everything(stream) == [token(0, 5, 6, 7), finish(3)]
    assert stream.num_repeated_tokens == 4


def several(index: int, choice: int, *token_ids: int, reason: FinishReason | None = None) -> TokenEvent:
    return TokenEvent("a", index, list(token_ids), choice, reason)


async def test_choices_are_counted_separately_and_end_separately():
    request = GenerationRequest(
        request_id="a", prompt_token_ids=[1, 2], sampling=SamplingParams(max_tokens=9, seed=0, n=2)
    )
    stream = Inbox(request)
    stop = FinishReason.STOP
    for event in (several(0, 1, 5), several(0, 0, 6), several(1, 1, 7, reason=stop), several(1, 1, 7, reason=stop)):
        stream.add_event(event)
    assert [stream.read(), stream.read()] == [several(0, 1, 5, 7, reason=stop), several(0, 0, 6)]
    stream.add_event(several(2, 0, 9))
    assert is_in(stream, StreamState.NEEDS_JOURNAL)  # index 1 of choice 0 is missing
    stream.add_journal([StoredChoice([6, 8, 9], FinishReason.LENGTH), StoredChoice([5, 7], stop)], None)
    stream.add_event(several(0, 2, 5))  # of a choice that was not requested
    stream.add_event(finish(5))
    assert await everything(stream) == [several(1, 0, 8, 9, reason=FinishReason.LENGTH), finish(5)]


async def test_frames_for_a_restore_hold_every_choice():
    request = GenerationRequest(
        request_id="a", prompt_token_ids=[1, 2], sampling=SamplingParams(max_tokens=9, seed=0, n=3)
    )
    stream = Inbox(request)
    stream.add_event(several(0, 2, 5, 6, reason=FinishReason.STOP))
    stream.add_event(several(0, 0, 7))
    journal = b"".join(map(encode, stream.frames))
    stored = [StoredChoice([7]), StoredChoice(), StoredChoice([5, 6], FinishReason.STOP)]
    assert journal_choices(journal, 3) == stored


async def test_gap_requests_the_journal_and_skips_nothing():
    stream = Inbox(REQUEST)
    stream.add_event(token(0, 5))
    stream.add_event(token(2, 7))
    assert is_in(stream, StreamState.NEEDS_JOURNAL)
    assert tokens_of(stream) == [5]
    stream.add_journal([StoredChoice([5, 6, 7])], None)
    assert is_in(stream, StreamState.LIVE)
    assert tokens_of(stream) == [5, 6, 7]


@pytest.mark.parametrize("end", [finish(3), ERROR], ids=["more tokens were generated", "an error has no count"])
async def test_end_that_may_hide_tokens_waits_for_the_journal(end):
    stream = Inbox(REQUEST)
    stream.add_event(token(0, 5))
    stream.add_event(end)
    assert is_in(stream, StreamState.NEEDS_JOURNAL)
    assert not stream.has_ended
    stream.add_journal([StoredChoice([5, 6, 7])], end)
    assert await everything(stream) == [token(0, 5, 6, 7), end]


async def test_end_waits_while_a_journal_is_decoded_that_may_have_other_tokens():
    stream = Inbox(REQUEST)
    stream.accept()
    stream.add_event(token(0, 5, 6))
    stream.need_journal()
    stream.begin_replay()
    stream.add_event(finish(2))
    assert is_in(stream, StreamState.NEEDS_JOURNAL)
    assert not stream.add_journal([StoredChoice([5, 66])], None)
    stream.end_replay()
    assert is_in(stream, StreamState.DIVERGED)


async def test_events_after_the_end_are_ignored():
    stream = Inbox(REQUEST)
    stream.add_event(finish(0))
    stream.add_event(token(0, 5))
    stream.add_event(ERROR)
    stream.add_journal([StoredChoice([5])], ERROR)
    assert await everything(stream) == [finish(0)]


async def test_older_or_shorter_journal_removes_nothing():
    stream = Inbox(REQUEST)
    stream.add_event(token(0, 5, 6))
    stream.add_journal([StoredChoice([5])], None)
    assert tokens_of(stream) == [5, 6]


async def test_waiting_reader_is_woken_and_may_be_cancelled():
    stream = Inbox(REQUEST)
    waiting = asyncio.create_task(anext(InboxReader(stream)))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    waiting = asyncio.create_task(anext(InboxReader(stream)))
    await asyncio.sleep(0)
    stream.add_event(token(0, 5))
    stream.on_ready()
    assert await waiting == token(0, 5)


async def test_withdrawn_stream_ends_with_its_received_tokens():
    stream = Inbox(REQUEST)
    stream.add_event(token(0, 5))
    stream.end(cancelled_event(stream))
    tokens, end = await everything(stream)
    assert tokens == token(0, 5) and isinstance(end, FinishEvent)
    assert (end.reason, end.usage.completion_tokens) == (FinishReason.CANCELLED, 1)


@pytest.mark.parametrize("seed", range(20))
async def test_any_disorder_of_frames_yields_the_journal(seed):
    """Lose, repeat, shuffle and split frames; now and then read a part of the journal."""
    rng = random.Random(seed)
    journal = [rng.randrange(50_000) for _ in range(60)]
    frames = [token(start, *journal[start : start + rng.randint(1, 5)]) for start in range(60) for _ in range(2)]
    rng.shuffle(frames)
    stream = Inbox(REQUEST)
    for frame in sorted(frames, key=lambda frame: frame.index + rng.randint(-8, 8)):
        if rng.random() < 0.8:
            stream.add_event(frame)
        if rng.random() < 0.1:
            stream.add_journal([StoredChoice(journal[: rng.randrange(61)])], None)
        assert tokens_of(stream) == journal[: stream.num_tokens]
    stream.add_journal([StoredChoice(journal)], finish(60))
    *tokens, end = await everything(stream)
    assert [event.token_ids for event in tokens if isinstance(event, TokenEvent)] == [journal]
    assert end == finish(60)


def test_worker_makes_progress_if_it_steps_or_is_idle():
    now = 0.0
    fleet = Fleet(lambda: now)

    def progress_after(seconds: float, step: int, running: int) -> float:
        nonlocal now
        now += seconds
        fleet.record_heartbeat(WorkerHeartbeat(worker_id="w", phase=WorkerPhase.READY, step=step, running=running))
        (status,) = fleet.snapshot()
        assert bool(ready_workers([status])) == (status.seconds_since_progress < 15)
        return status.seconds_since_progress

    assert progress_after(0, step=3, running=1) == 0
    assert progress_after(9, step=3, running=1) == 9
    assert progress_after(9, step=4, running=1) == 0
    assert progress_after(20, step=4, running=1) == 20  # hung: not ready
    assert progress_after(1, step=4, running=0) == 0
    assert progress_after(99, step=4, running=0) == 0  # idle


def test_fleet_always_remembers_the_last_ready_worker():
    now = 0.0
    fleet = Fleet(lambda: now)
    for phase in (WorkerPhase.LOAD, WorkerPhase.WARMUP):
        fleet.record_heartbeat(WorkerHeartbeat(worker_id="w0.a", phase=phase))
    fleet.record_heartbeat(WorkerHeartbeat(worker_id="supervisor", phase=WorkerPhase.READY))
    assert fleet.last_ready is None
    fleet.record_heartbeat(WorkerHeartbeat(worker_id="w0.a", phase=WorkerPhase.READY, max_model_len=64))
    now = 3600.0
    fleet.record_heartbeat(WorkerHeartbeat(worker_id="w0.a", phase=WorkerPhase.DRAINING))
    fleet.record_heartbeat(WorkerHeartbeat(worker_id="w0.b", phase=WorkerPhase.LOAD))
    assert [status.heartbeat.worker_id for status in fleet.snapshot()] == ["w0.a", "w0.b"]
    assert fleet.last_ready is not None
    assert (fleet.last_ready.heartbeat.max_model_len, fleet.last_ready.seconds_since_seen) == (64, 3600.0)


def test_fleet_remembers_workers_for_a_minute_by_its_clock():
    now = 0.0
    fleet = Fleet(lambda: now)
    for worker_id in ("w1.b", "supervisor", "w0.a"):
        fleet.record_heartbeat(WorkerHeartbeat(worker_id=worker_id, phase=WorkerPhase.READY))
    now = 59.0
    fleet.record_heartbeat(WorkerHeartbeat(worker_id="w0.a", phase=WorkerPhase.READY, step=5))
    assert [(status.heartbeat.worker_id, status.seconds_since_seen) for status in fleet.snapshot()] == [
        ("supervisor", 59.0),
        ("w0.a", 0.0),
        ("w1.b", 59.0),
    ]
    now = 61.0
    assert [status.heartbeat.step for status in fleet.snapshot()] == [5]


class WatchedInbox(Inbox):
    """An inbox that records each change of its state."""

    def __init__(self, request: GenerationRequest) -> None:
        super().__init__(request)
        self.changes: set[tuple[StreamState, StreamState]] = set()

    def _become(self, state: StreamState) -> None:
        before = self.state
        super()._become(state)
        if state is not before:
            self.changes.add((before, state))


def walk(rng: random.Random) -> WatchedInbox:
    """Call an inbox as its gateway may, in any order; the reader never gets an index twice or skips one."""
    inbox = WatchedInbox(REQUEST)
    num_read = epoch = 0

    def read() -> None:
        nonlocal num_read
        if isinstance(event := inbox.read(), TokenEvent):
            assert event.index == num_read
            num_read += len(event.token_ids)

    for _ in range(40):
        known = tokens_of(inbox)
        longer = [*known, 5, 5]
        calls: list[Callable[[], object]] = [
            inbox.accept,
            inbox.need_journal,
            read,
            read,
            partial(inbox.add_event, scored(len(known), 5, 5)),
            partial(inbox.add_event, scored(len(known) + 1, 5)),  # follows a gap
            partial(inbox.add_event, token(0, 6)),  # a different token
            partial(inbox.add_event, finish(len(known) + rng.randrange(2))),
        ]
        if inbox.state is not StreamState.PENDING:  # recovery leaves a pending stream alone
            calls += [
                inbox.begin_replay,
                inbox.end_replay,
                partial(inbox.add_journal, scored_journal(*longer), None),
                partial(inbox.add_journal, [StoredChoice([6])], None),
            ]
            epoch += 1
            calls += [] if inbox.has_ended else [partial(inbox.suspend, epoch)]
        calls += [inbox.resume] if inbox.state is StreamState.SUSPENDED else []
        calls += [partial(inbox.end, cancelled_event(inbox))] if rng.random() < 0.1 else []
        rng.choice(calls)()
    return inbox


def test_random_calls_reach_exactly_the_legal_transitions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inbox, "MAX_UNREAD_SCORES", 3)
    changes: set[tuple[StreamState, StreamState]] = set()
    for seed in range(500):
        changes |= walk(random.Random(seed)).changes
    assert changes == {(before, after) for before, states in TRANSITIONS.items() for after in states}


def test_illegal_transition_raises_and_changes_nothing() -> None:
    stream = Inbox(REQUEST)
    with pytest.raises(IllegalTransition, match="pending to suspended"):
        stream.suspend(1)
    stream.end(ERROR)
    with pytest.raises(IllegalTransition, match="ended to needs_journal"):
        stream.resume()
    assert is_in(stream, StreamState.ENDED) and stream.epoch == 0
