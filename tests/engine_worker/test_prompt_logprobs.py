"""Prompt logprobs: each token once and before the first output token, with chunks, caches, preemption, or takeover."""

from collections import Counter
from typing import Any

import pytest

from engine_worker.engine import _prompt_events
from engine_worker.scheduling.batch import StepResult
from shared.messages import ErrorEvent, GenerationRequest, PromptLogprobs, StoredChoice, StreamEvent, TokenEvent
from tests.builders import (
    FakeModelRunner,
    Transcript,
    expected_output,
    fake_logprobs,
    make_engine,
    make_request,
    make_sequence,
)


def run(engine: Any) -> list[StreamEvent]:
    events: list[StreamEvent] = []
    transcript = Transcript()
    while engine.has_work:
        step = engine.step()
        transcript.add(step)  # checks that no event has an index out of order
        engine.check_integrity()
        events += step
    return events


def scores_of(events: list[StreamEvent], request_id: str) -> list[PromptLogprobs]:
    tokens = [event for event in events if isinstance(event, TokenEvent) and event.request_id == request_id]
    return [event.prompt_logprobs for event in tokens if event.prompt_logprobs is not None]


def assert_each_token_once(scores: list[PromptLogprobs], prompt: list[int], start: int = 1) -> None:
    by_index = {score.start + place: entry for score in scores for place, entry in enumerate(score.tokens)}
    assert by_index == {index: fake_logprobs(prompt[index]) for index in range(start, len(prompt))}
    assert sum(len(score.tokens) for score in scores) == len(by_index)


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_prompt_logprobs_come_by_chunk_before_first_token(async_scheduling: bool) -> None:
    engine = make_engine(max_num_batched_tokens=8, async_scheduling=async_scheduling)
    engine.add_request(request := make_request(20, "a", max_tokens=2, ignore_eos=True, prompt_logprobs=0))
    events = run(engine)
    kinds = ["scores" if isinstance(e, TokenEvent) and e.prompt_logprobs else "other" for e in events]
    assert kinds == ["scores"] * 3 + ["other"] * 3
    assert [(score.start, len(score.tokens)) for score in scores_of(events, "a")] == [(1, 8), (9, 8), (17, 3)]
    assert_each_token_once(scores_of(events, "a"), request.prompt_token_ids)


def test_prompt_logprobs_one_token_prompt_has_none() -> None:
    engine = make_engine()
    engine.add_request(make_request([7], "a", max_tokens=1, prompt_logprobs=0))
    assert scores_of(run(engine), "a") == []


def test_prompt_logprobs_skip_prefix_cache_only_for_request() -> None:
    engine = make_engine()
    prompt = make_request(20).prompt_token_ids
    engine.add_request(make_request(prompt, "first", max_tokens=1))
    run(engine)
    engine.add_request(make_request(prompt, "scored", max_tokens=1, prompt_logprobs=2))
    engine.add_request(make_request(prompt, "plain", max_tokens=1))
    events = run(engine)
    assert_each_token_once(scores_of(events, "scored"), prompt)
    ends = {event.request_id: event for event in events if not isinstance(event, TokenEvent)}
    assert ends["scored"].usage.cached_tokens == 0 and ends["plain"].usage.cached_tokens > 0  # type: ignore[union-attr]


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_prompt_logprobs_preempted_come_once(async_scheduling: bool) -> None:
    """39 blocks of 4 for four requests of 40 prompt and 30 output tokens: they preempt each other."""
    executor = FakeModelRunner(num_blocks=40)
    engine = make_engine(executor, num_blocks=40, max_num_batched_tokens=16, async_scheduling=async_scheduling)
    requests = [
        make_request(40, f"r{number}", max_tokens=30, ignore_eos=True, prompt_logprobs=0) for number in range(4)
    ]
    for request in requests:
        engine.add_request(request)
    events = run(engine)
    assert sum(engine.stats().counters.preemptions.values()) > 0
    for request in requests:
        assert_each_token_once(scores_of(events, request.request_id), request.prompt_token_ids)


def test_prompt_logprobs_are_shared_by_sequences() -> None:
    engine = make_engine()
    engine.add_request(request := make_request(9, "a", n=3, temperature=1.0, max_tokens=3, prompt_logprobs=0))
    assert_each_token_once(scores_of(run(engine), "a"), request.prompt_token_ids)


def resumed(request: GenerationRequest, num_tokens: int, num_scored: int) -> StoredChoice:
    scores = {index: fake_logprobs(request.prompt_token_ids[index]) for index in range(1, num_scored)}
    return StoredChoice(expected_output(request)[:num_tokens], prompt_logprobs=scores)


@pytest.mark.parametrize(("num_tokens", "num_scored"), [(0, 0), (0, 9), (3, 20)])
def test_prompt_logprobs_takeover_sends_the_rest(num_tokens: int, num_scored: int) -> None:
    engine = make_engine()
    request = make_request(20, "a", max_tokens=6, ignore_eos=True, prompt_logprobs=0)
    choice = resumed(request, num_tokens, num_scored)
    engine.add_request(request, [choice])
    tokens = Transcript()
    tokens.resume("a", choice.token_ids)
    events: list[StreamEvent] = []
    while engine.has_work:
        step = engine.step()
        tokens.add(step)
        events += step
    assert tokens.tokens["a"] == expected_output(request)
    assert_each_token_once(scores_of(events, "a"), request.prompt_token_ids, max(1, num_scored))
    assert Counter(isinstance(event, TokenEvent) and bool(event.token_ids) for event in events)[True] == 6 - num_tokens


def test_prompt_logprobs_with_beam_search_are_refused() -> None:
    engine = make_engine()
    engine.add_request(make_request(5, "a", use_beam_search=True, beam_width=2, prompt_logprobs=1))
    (event,) = run(engine)
    assert isinstance(event, ErrorEvent) and "prompt_logprobs" in event.message


def test_prompt_logprobs_recomputed_are_sent_once() -> None:
    """A sequence preempted while its step runs gives the results of that step and of its recomputation."""
    sequence = make_sequence(9, prompt_logprobs=0)
    first, again = ([fake_logprobs(token_id) for token_id in sequence.prompt_token_ids[1:stop]] for stop in (4, 7))
    sent = [
        _prompt_events(StepResult([], prompt_logprobs=[(sequence, PromptLogprobs(1, scores))]))
        for scores in (first, again, first)
    ]
    assert [[event.prompt_logprobs for event in events if isinstance(event, TokenEvent)] for events in sent] == [
        [PromptLogprobs(1, first)],
        [PromptLogprobs(4, again[3:])],
        [],
    ]
