"""Engine events: their kinds, order, and indices, and that a failing request does not affect the others."""

from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest

from engine_worker.engine import DuplicateRequest
from engine_worker.scheduling.batch import ScheduledBatch
from shared.messages import ErrorCode, ErrorEvent, FinishEvent, FinishReason, StoredChoice, TokenEvent, Usage
from tests.builders import (
    EOS_TOKEN_ID,
    FakeModelRunner,
    Transcript,
    expected_output,
    fake_logprobs,
    make_engine,
    make_request,
    make_sampling,
    next_token,
    run_to_end,
)

CANCELLED, LENGTH, STOP = FinishReason.CANCELLED, FinishReason.LENGTH, FinishReason.STOP


def test_engine_step_gives_one_token_event_then_finish() -> None:
    engine = make_engine()
    engine.add_request(request := make_request(5, "a", max_tokens=3, ignore_eos=True))
    first, second, third = expected_output(request)
    assert [engine.step() for _ in range(4)] == [
        [TokenEvent("a", 0, [first])],
        [TokenEvent("a", 1, [second])],
        [TokenEvent("a", 2, [third]), FinishEvent("a", LENGTH, Usage(prompt_tokens=5, completion_tokens=3))],
        [],
    ]
    assert not engine.has_work


def test_chunked_prompt_gives_no_event_before_last_chunk() -> None:
    engine = make_engine(max_num_batched_tokens=8)
    engine.add_request(request := make_request(20, "a"))
    assert [engine.step() for _ in range(3)] == [[], [], [TokenEvent("a", 0, expected_output(request)[:1])]]


def test_logprobs_only_for_requests_that_set_them() -> None:
    engine = make_engine()
    asking = make_request(5, "asking", max_tokens=2, ignore_eos=True, logprobs=0)
    other = make_request(5, "other", max_tokens=2, ignore_eos=True)
    engine.add_request(asking)
    engine.add_request(other)
    events = [event for _ in range(2) for event in engine.step() if isinstance(event, TokenEvent)]
    asked, silent = ([event for event in events if event.request_id == id_] for id_ in ("asking", "other"))
    assert [event.logprobs for event in asked] == [[fake_logprobs(token)] for token in expected_output(asking)]
    assert [event.logprobs for event in silent] == [None, None]


def request_that_stops() -> tuple[Any, list[int]]:
    """Return a greedy request and its first 6 tokens without a stop. Tests make one of them a stop token."""
    request = make_request(5, "a", max_tokens=6, ignore_eos=True)
    tokens = expected_output(request)
    assert len(set(tokens)) == 6
    return request, tokens


def with_sampling(request: Any, **changes: Any) -> Any:
    return make_request(request.prompt_token_ids, request.request_id, **{"max_tokens": 6, **changes})


def test_stop_token_is_last_token_sent() -> None:
    request, tokens = request_that_stops()
    engine = make_engine()
    engine.add_request(with_sampling(request, ignore_eos=True, stop_token_ids=(tokens[2],)))
    transcript = run_to_end(engine)
    assert transcript.tokens == {"a": tokens[:3]}
    assert transcript.ends == {"a": FinishEvent("a", STOP, Usage(prompt_tokens=5, completion_tokens=3))}


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_eos_stops_unless_ignored(ignore_eos: bool) -> None:
    request, tokens = request_that_stops()
    engine = make_engine(eos_token_ids=[tokens[1], 999])
    engine.add_request(with_sampling(request, ignore_eos=ignore_eos))
    transcript = run_to_end(engine)
    assert transcript.tokens["a"] == (tokens if ignore_eos else tokens[:2])
    assert transcript.ends["a"].reason is (LENGTH if ignore_eos else STOP)  # type: ignore[union-attr]


def test_min_tokens_masks_stop_tokens_until_reached() -> None:
    request, tokens = request_that_stops()
    sampling = {"max_tokens": 30, "min_tokens": 4, "stop_token_ids": (tokens[1],)}
    engine = make_engine(vocab_size=1000)
    engine.add_request(stopped := with_sampling(request, **sampling))
    output = run_to_end(engine).tokens["a"]
    assert output == expected_output(stopped)
    assert len(output) >= 4 and tokens[1] not in output[:4]
    assert output[1] == tokens[1] + 1  # the fake sampler's substitute for a masked token


def test_max_model_len_reached_finishes_with_length() -> None:
    engine = make_engine(max_model_len=8)
    engine.add_request(make_request(5, "a", max_tokens=100, ignore_eos=True))
    transcript = run_to_end(engine)
    assert transcript.ends == {"a": FinishEvent("a", LENGTH, Usage(prompt_tokens=5, completion_tokens=3))}


def test_full_kv_cache_single_sequence_finishes_with_length() -> None:
    engine = make_engine(num_blocks=4, block_size=4)
    engine.add_request(make_request(5, "a", max_tokens=100, ignore_eos=True))
    transcript = run_to_end(engine)
    assert transcript.ends == {"a": FinishEvent("a", LENGTH, Usage(prompt_tokens=5, completion_tokens=7))}


# Failures of one request


def bystander_is_undisturbed(transcript: Transcript, request: Any) -> bool:
    return transcript.tokens[request.request_id] == expected_output(request)


@pytest.mark.parametrize(
    ("prompt", "sampling", "resumed", "code"),
    [
        ([], {}, [], ErrorCode.INVALID_REQUEST),
        ([1000], {}, [], ErrorCode.INVALID_REQUEST),
        ([-1], {}, [], ErrorCode.INVALID_REQUEST),
        ([5], {}, [1000], ErrorCode.INVALID_REQUEST),
        ([5], {"max_tokens": 0}, [], ErrorCode.INVALID_REQUEST),
        ([5], {"temperature": float("nan")}, [], ErrorCode.INVALID_REQUEST),
        ([5] * 256, {}, [], ErrorCode.INVALID_REQUEST),
        ([5] * 128, {}, [], ErrorCode.CAPACITY_EXCEEDED),
    ],
)
def test_refused_request_does_not_affect_others(
    prompt: list[int], sampling: dict[str, Any], resumed: list[int], code: ErrorCode
) -> None:
    engine = make_engine(num_blocks=33, block_size=4)  # 128 slots
    engine.add_request(bystander := make_request(6, "b"))
    engine.step()
    engine.add_request(make_request(prompt, "bad", **sampling), [StoredChoice(resumed)])
    engine.check_integrity()
    events = engine.step()
    assert [type(event) for event in events if event.request_id == "bad"] == [ErrorEvent]
    assert events[0].code is code  # type: ignore[union-attr]
    transcript = Transcript(tokens={"b": expected_output(bystander)[:2]})
    assert bystander_is_undisturbed(run_to_end(engine, transcript), bystander)
    assert engine.stats().counters.finished["error"] == 1


def test_sampling_failure_ends_only_its_request() -> None:
    runner = FakeModelRunner()
    engine = make_engine(runner)
    engine.add_request(make_request(5, "a", ignore_eos=True))
    engine.add_request(bystander := make_request(6, "b", ignore_eos=True))
    transcript = Transcript()
    transcript.add(engine.step())
    runner.failures["a"] = "grammar left no token"
    run_to_end(engine, transcript)
    assert transcript.ends["a"] == ErrorEvent("a", ErrorCode.REQUEST_FAILED, "grammar left no token")
    assert len(transcript.tokens["a"]) == 1
    assert bystander_is_undisturbed(transcript, bystander)
    assert engine.stats().kv_cache.num_active_blocks == 0


def test_executor_exception_reaches_caller() -> None:
    def break_down(batch: ScheduledBatch) -> None:
        raise RuntimeError("device lost")

    engine = make_engine(FakeModelRunner(before_step=break_down))
    engine.add_request(make_request())
    with pytest.raises(RuntimeError, match="device lost"):
        engine.step()


def test_request_id_in_use_is_refused_until_it_ends() -> None:
    engine = make_engine()
    engine.add_request(request := make_request(5, "a", max_tokens=1))
    with pytest.raises(DuplicateRequest, match="a"):
        engine.add_request(request)
    run_to_end(engine)
    engine.add_request(request)
    assert run_to_end(engine).tokens["a"] == expected_output(request)


# Cancellation


def test_abort_frees_blocks_at_once_without_event() -> None:
    engine = make_engine()
    engine.add_request(make_request(9, "a", max_tokens=50, ignore_eos=True))
    engine.add_request(bystander := make_request(6, "b", ignore_eos=True))
    transcript = Transcript()
    transcript.add(engine.step())
    assert engine.stats().kv_cache.num_active_blocks == 5
    for request_id in ("a", "a", "unknown"):
        engine.abort_request(request_id)
    assert engine.stats().kv_cache.num_active_blocks == 2
    run_to_end(engine, transcript)
    assert transcript.ends.keys() == {"b"} and len(transcript.tokens["a"]) == 1
    assert bystander_is_undisturbed(transcript, bystander)
    assert engine.stats().counters.finished == {"stop": 0, "length": 1, "cancelled": 1, "error": 0}


def test_abort_of_waiting_or_refused_gives_no_event() -> None:
    engine = make_engine(max_num_seqs=1)
    for request in (make_request(5, "a", max_tokens=2, ignore_eos=True), make_request(5, "b"), make_request([], "c")):
        engine.add_request(request)
    engine.abort_request("b")
    engine.abort_request("c")
    engine.check_integrity()
    assert engine.request_ids == {"a"}
    assert run_to_end(engine).ends.keys() == {"a"}


def test_aborted_request_id_can_be_reused() -> None:
    engine = make_engine()
    engine.add_request(request := make_request(9, "a"))
    engine.step()
    engine.abort_request("a")
    engine.add_request(request)
    assert run_to_end(engine).tokens["a"] == expected_output(request)


# Resuming


def test_resumed_request_continues_at_next_index() -> None:
    request = make_request(5, "a", max_tokens=6, ignore_eos=True)
    tokens = expected_output(request)
    engine = make_engine()
    engine.add_request(request, [StoredChoice(tokens[:4])])
    assert [engine.step(), engine.step()] == [
        [TokenEvent("a", 4, [tokens[4]])],
        [TokenEvent("a", 5, [tokens[5]]), FinishEvent("a", LENGTH, Usage(prompt_tokens=5, completion_tokens=6))],
    ]


@pytest.mark.parametrize(
    ("journal", "sampling", "reason"),
    [
        ([7, 8, EOS_TOKEN_ID], {}, STOP),
        ([7, 8, 9], {"stop_token_ids": (9,)}, STOP),
        ([7, 8, 9], {"max_tokens": 3}, LENGTH),
        ([7] * 27, {"max_tokens": 1000}, LENGTH),  # context of 32
    ],
)
def test_complete_journal_finishes_without_step(
    journal: list[int], sampling: dict[str, Any], reason: FinishReason
) -> None:
    def never(batch: ScheduledBatch) -> None:
        raise AssertionError("nothing is left to compute")

    engine = make_engine(FakeModelRunner(before_step=never), max_model_len=32)
    engine.add_request(make_request(5, "a", **sampling), [StoredChoice(journal)])
    assert engine.has_work
    assert engine.step() == [FinishEvent("a", reason, Usage(prompt_tokens=5, completion_tokens=len(journal)))]
    assert not engine.has_work


# Statistics


def ticks() -> Iterator[float]:
    return (float(number) for number in count())


def test_stats_count_running_and_waiting_requests() -> None:
    engine = make_engine(max_num_seqs=1, clock=ticks().__next__)
    engine.add_request(make_request(9, "a", max_tokens=3, ignore_eos=True))
    engine.add_request(make_request(5, "b", max_tokens=2, ignore_eos=True))
    transcript = Transcript()
    transcript.add(engine.step())
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting) == (1, 1)
    kv_cache, step = stats.kv_cache, stats.last_step
    assert (kv_cache.num_active_blocks, kv_cache.num_free_blocks, kv_cache.num_wasted_slots) == (3, 61, 3)
    assert (step.num_sequences, step.num_tokens, step.num_sampled_tokens) == (1, 9, 1)
    assert step.phase_seconds == {"schedule": 1.0, "prepare": 0.0, "forward": 0.0, "sample": 0.0, "apply": 1.0}
    run_to_end(engine, transcript)
    counters = engine.stats().counters
    assert (counters.steps, counters.generated_tokens) == (5, 5)
    assert (counters.computed_tokens, counters.prompt_tokens_computed) == (9 + 2 + 5 + 1, 14)
    assert (counters.swapped_in_blocks, counters.swapped_out_blocks) == (0, 0)
    assert counters.preemptions == {"recompute": 0, "swap": 0}
    assert counters.finished == {"stop": 0, "length": 2, "cancelled": 0, "error": 0}


def test_stats_preemption_counts_recomputed_tokens() -> None:
    engine = make_engine(num_blocks=8, block_size=4, enable_prefix_caching=False)
    for name in ("a", "b"):
        engine.add_request(make_request(8, name, max_tokens=12, ignore_eos=True))
    run_to_end(engine)
    counters = engine.stats().counters
    assert counters.preemptions == {"recompute": 1, "swap": 0}
    assert counters.prompt_tokens_computed == 24
    assert counters.generated_tokens == 24


def test_stats_empty_step_is_not_counted() -> None:
    engine = make_engine()
    engine.add_request(make_request(5, "a", max_tokens=1))
    engine.step()
    assert engine.last_step.num_tokens == 5
    engine.add_request(make_request([], "refused"))
    assert len(engine.step()) == 1
    assert (engine.last_step.num_sequences, engine.last_step.num_tokens, engine.last_step.phase_seconds) == (0, 0, {})
    assert engine.step() == []
    assert engine.stats().counters.steps == 1


# The fake model


def test_fake_model_reads_cache_through_block_table() -> None:
    """A wrong block in the table must change the next token. Otherwise the exactness tests prove nothing."""
    engine = make_engine()
    engine.add_request(request := make_request(6, "a", ignore_eos=True))
    engine.step()
    (group,) = engine._scheduler._running.values()
    (sequence,) = group.active
    sequence.kv.tables[0].blocks.reverse()
    (event,) = engine.step()
    assert isinstance(event, TokenEvent) and event.token_ids != expected_output(request)[1:2]


def test_fake_model_seeded_tokens_depend_on_seed_and_index() -> None:
    def token(seed: int, index: int) -> int:
        return next_token([5, 6], index, make_sampling(temperature=1.0, seed=seed), frozenset(), 1000)

    assert len({token(seed, index) for seed in range(3) for index in range(3)}) == 9
