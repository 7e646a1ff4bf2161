"""Requests with several sequences (n > 1 or beams).

The prompt is computed once, blocks are copied on write, and each sequence is admitted and preempted separately.
"""

from typing import Any

import pytest

from engine_worker.engine import Engine
from engine_worker.scheduling.batch import ScheduledBatch
from shared.messages import ErrorCode, ErrorEvent, FinishEvent, FinishReason, StoredChoice, TokenEvent, Usage
from tests.builders import (
    EOS_TOKEN_ID,
    FakeModelRunner,
    Transcript,
    expected_beams,
    expected_output,
    make_engine,
    make_request,
    preempted,
    run_to_end,
)

LENGTH, STOP = FinishReason.LENGTH, FinishReason.STOP


def outputs(transcript: Transcript, request: Any) -> list[list[int]]:
    return [transcript.choice(request.request_id, choice) for choice in range(request.sampling.n)]


def expected(request: Any, max_num_tokens: int = 256) -> list[list[int]]:
    return [
        expected_output(request, choice=choice, max_num_tokens=max_num_tokens) for choice in range(request.sampling.n)
    ]


def sampled(prompt: int = 9, request_id: str = "a", **sampling: Any) -> Any:
    defaults = {"n": 3, "max_tokens": 3, "temperature": 1.0, "seed": 5, "ignore_eos": True}
    return make_request(prompt, request_id, **{**defaults, **sampling})


class Batches:
    """Records every batch."""

    def __init__(self) -> None:
        self.seen: list[ScheduledBatch] = []

    def __call__(self, batch: ScheduledBatch) -> None:
        self.seen.append(batch)

    @property
    def num_tokens(self) -> list[int]:
        return [batch.num_tokens for batch in self.seen]

    @property
    def num_copies(self) -> list[int]:
        return [len(batch.transfers.kv.copies) for batch in self.seen]


def counted_engine(**config: Any) -> tuple[Engine, Batches]:
    batches = Batches()
    runner = FakeModelRunner(num_blocks=config.get("num_blocks", 65), before_step=batches)
    return make_engine(runner, **{"enable_prefix_caching": False, **config}), batches


def num_active_blocks(engine: Engine) -> int:
    return engine.stats().kv_cache.num_active_blocks


# Events


def test_group_sequences_end_separately_request_ends_once() -> None:
    engine = make_engine()
    engine.add_request(request := sampled(n=2, max_tokens=2))
    (first, second), (third, fourth) = expected(request)
    assert [engine.step(), engine.step()] == [
        [TokenEvent("a", 0, [first]), TokenEvent("a", 0, [third], 1)],
        [
            TokenEvent("a", 1, [second], 0, LENGTH),
            TokenEvent("a", 1, [fourth], 1, LENGTH),
            FinishEvent("a", LENGTH, Usage(prompt_tokens=9, completion_tokens=4)),
        ],
    ]
    assert not engine.has_work and num_active_blocks(engine) == 0


def test_group_stopped_sequence_leaves_others_running() -> None:
    request = sampled(max_tokens=6)
    stop = expected(request)[1][2]
    assert all(stop not in output for output in (expected(request)[0], expected(request)[2]))
    engine = make_engine()
    engine.add_request(request := sampled(max_tokens=6, stop_token_ids=(stop,)))
    transcript = run_to_end(engine)
    assert outputs(transcript, request) == expected(request)
    assert [len(output) for output in outputs(transcript, request)] == [6, 3, 6]
    assert transcript.choice_ends == {("a", 0): LENGTH, ("a", 1): STOP, ("a", 2): LENGTH}
    assert transcript.ends["a"] == FinishEvent("a", LENGTH, Usage(prompt_tokens=9, completion_tokens=15))


def test_group_first_sequence_equals_n_1() -> None:
    assert expected(sampled(n=3))[0] == expected(sampled(n=1))[0]
    assert len({tuple(output) for output in expected(sampled(n=8))}) == 8


# Blocks


def test_group_prompt_is_computed_once_last_block_copied() -> None:
    """9 tokens in blocks of 4: two full blocks stay shared; the third holds one token and gets two copies."""
    engine, batches = counted_engine()
    engine.add_request(sampled())
    engine.step()
    assert num_active_blocks(engine) == 3
    assert engine.stats().kv_cache.sharing_ratio == 1 - 3 / 9
    engine.step()
    assert num_active_blocks(engine) == 5
    assert engine.stats().kv_cache.sharing_ratio == pytest.approx(1 - 5 / 9)
    run_to_end(engine, Transcript(tokens={"a": [0] * 2}, others={("a", 1): [0] * 2, ("a", 2): [0] * 2}))
    assert batches.num_tokens == [9, 3, 3]
    assert batches.num_copies == [0, 2, 0]


def test_group_prompt_filling_its_blocks_needs_no_copy() -> None:
    engine, batches = counted_engine()
    engine.add_request(sampled(8))
    run_to_end(engine)
    assert (batches.num_tokens, batches.num_copies) == ([8, 3, 3], [0, 0, 0])


def test_group_chunked_prompt_forks_after_last_chunk() -> None:
    engine, batches = counted_engine(max_num_batched_tokens=8)
    engine.add_request(request := sampled(20))
    assert outputs(run_to_end(engine), request) == expected(request)
    assert batches.num_tokens == [8, 8, 4, 3, 3]


def test_beams_copy_at_most_one_block_each() -> None:
    engine, batches = counted_engine()
    engine.add_request(request := make_request(9, "a", use_beam_search=True, beam_width=4, n=4, max_tokens=12))
    transcript = run_to_end(engine)
    ends = [transcript.choice_ends["a", choice] for choice in range(4)]
    assert list(zip(outputs(transcript, request), ends, strict=True)) == expected_beams(request)
    assert all(num_copies <= 4 for num_copies in batches.num_copies) and sum(batches.num_copies) > 4
    assert batches.num_tokens == [9, *[4] * (len(batches.seen) - 1)]


def test_beam_search_sends_tokens_only_at_its_end() -> None:
    engine = make_engine()
    request = make_request(9, "a", use_beam_search=True, beam_width=3, n=2, max_tokens=2, ignore_eos=True)
    engine.add_request(request)
    (first, _), (second, _) = expected_beams(request)
    assert [engine.step(), engine.step()] == [
        [TokenEvent("a", 0, [])],
        [
            TokenEvent("a", 0, first, 0, LENGTH),
            TokenEvent("a", 0, second, 1, LENGTH),
            FinishEvent("a", LENGTH, Usage(prompt_tokens=9, completion_tokens=4)),
        ],
    ]


# Admission of single sequences


def test_group_sequences_fork_as_slots_become_free() -> None:
    engine, batches = counted_engine(max_num_seqs=4)
    for name, n in (("a", 3), ("b", 2), ("c", 1)):
        engine.add_request(sampled(request_id=name, n=n, max_tokens=4))
    transcript = run_to_end(engine)
    choices = [
        {(item.sequence.request_id, item.sequence.sequence_index) for item in batch.sequences} for batch in batches.seen
    ]
    # First sequences are admitted before the third of a and the second of b.
    assert choices[0] == {("a", 0), ("a", 1), ("b", 0), ("c", 0)}
    assert choices[4] == {("a", 2), ("b", 1)} and len(choices) == 8
    assert transcript.ends.keys() == {"a", "b", "c"}


def test_group_newest_sequence_is_preempted_alone() -> None:
    """15 blocks: a grows from 3 to 12, so the third and then the second sequence of b are preempted."""
    engine, batches = counted_engine(num_blocks=16)
    requests = [sampled(8, "a", n=1, max_tokens=40), sampled(9, "b", max_tokens=12)]
    for request in requests:
        engine.add_request(request)
    transcript = run_to_end(engine)
    assert [outputs(transcript, request) for request in requests] == [expected(request) for request in requests]
    assert {name for batch in batches.seen for name in preempted(engine._scheduler, batch)} == {"b"}
    prompts = [item.sequence.sequence_index for batch in batches.seen for item in batch.sequences if item.start == 0]
    assert prompts == [0, 0, 2]  # of a, of b, and of the sequence resumed after all holders of the prompt ended


@pytest.mark.parametrize("enable_prefix_caching", [False, True])
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_group_exceeding_kv_cache_gives_full_outputs(enable_prefix_caching: bool, async_scheduling: bool) -> None:
    shape: dict[str, Any] = {"num_blocks": 65, "block_size": 16}
    engine = make_engine(
        FakeModelRunner(**shape),
        **shape,
        max_num_seqs=32,
        max_model_len=1000,
        enable_prefix_caching=enable_prefix_caching,
        async_scheduling=async_scheduling,
    )
    engine.add_request(request := sampled(20, n=16, max_tokens=500))
    transcript = run_to_end(engine)
    assert outputs(transcript, request) == expected(request, max_num_tokens=1000)
    assert all(len(output) == 500 for output in outputs(transcript, request))


def test_beams_alone_grow_until_kv_cache_is_full() -> None:
    """12 blocks, 2 of them shared: each of 3 beams gets 3 of its own."""
    engine = make_engine(num_blocks=13)
    request = make_request(9, "a", use_beam_search=True, beam_width=3, n=3, max_tokens=100, ignore_eos=True)
    engine.add_request(request)
    outputs_of_20 = [output for output, _ in expected_beams(request, max_num_tokens=20)]
    assert outputs(run_to_end(engine), request) == outputs_of_20


def test_beams_larger_than_kv_cache_are_refused() -> None:
    engine = make_engine(num_blocks=7, max_num_seqs=16)
    engine.add_request(make_request(9, "a", use_beam_search=True, beam_width=5, n=5, max_tokens=2))
    (event,) = engine.step()
    assert isinstance(event, ErrorEvent) and event.code is ErrorCode.CAPACITY_EXCEEDED


def test_beams_above_half_of_slots_are_refused() -> None:
    engine = make_engine(max_num_seqs=8)
    for width in (4, 5):
        engine.add_request(make_request(9, f"{width}", use_beam_search=True, beam_width=width, n=1, max_tokens=2))
    ends = run_to_end(engine).ends
    assert isinstance(ends["4"], FinishEvent)
    assert isinstance(refused := ends["5"], ErrorEvent) and refused.code is ErrorCode.INVALID_REQUEST
    assert refused.message == "beam_width is 5; this worker computes at most 4 beams"


def test_group_abort_and_failure_end_all_sequences() -> None:
    runner = FakeModelRunner()
    engine = make_engine(runner)
    for name in ("a", "b", "c"):
        engine.add_request(sampled(request_id=name, max_tokens=9))
    transcript = Transcript()
    transcript.add(engine.step())
    engine.abort_request("a")
    runner.failures["b"] = "broken"
    run_to_end(engine, transcript)
    assert transcript.ends["b"] == ErrorEvent("b", ErrorCode.REQUEST_FAILED, "broken")
    assert transcript.ends.keys() == {"b", "c"} and num_active_blocks(engine) == 0


# Resuming


@pytest.mark.parametrize("num_stored", [(1, 1, 1), (2, 5, 3), (6, 5, 6), (1, 6, 2), (0, 0, 0), (0, 2, 1), (2, 0, 3)])
@pytest.mark.parametrize("config", [{}, {"async_scheduling": True}, {"max_num_batched_tokens": 8}], ids=str)
def test_group_resumes_each_sequence_at_its_index(num_stored: tuple[int, ...], config: dict[str, Any]) -> None:
    request = sampled(max_tokens=6)
    stored = [
        StoredChoice(output[:length], LENGTH if length == 6 else None)
        for output, length in zip(expected(request), num_stored, strict=True)
    ]
    engine, batches = counted_engine(**config)
    engine.add_request(request, stored)
    transcript = Transcript()
    for choice, part in enumerate(stored):
        transcript.resume("a", part.token_ids, choice)
    run_to_end(engine, transcript)
    assert outputs(transcript, request) == expected(request)
    assert transcript.ends["a"] == FinishEvent("a", LENGTH, Usage(prompt_tokens=9, completion_tokens=18))
    # The prompt once, its last token again for a sequence without tokens when others have some, then all unknown
    # tokens except the last of each sequence.
    num_again = 9 + sum(max(0, length - 1) for length in num_stored if length < 6)
    num_new = sum(6 - length - (length == 0) for length in num_stored if length < 6)
    num_extra = num_stored.count(0) if any(num_stored) and num_stored[0] else 0
    assert sum(batches.num_tokens) == num_again + num_new + num_extra


@pytest.mark.parametrize("sampling", [{"n": 2}, {"n": 2, "use_beam_search": True, "beam_width": 2, "temperature": 0.0}])
def test_group_complete_journal_finishes_at_once(sampling: dict[str, Any]) -> None:
    engine = make_engine()
    request = sampled(max_tokens=6, **sampling)
    engine.add_request(request, [StoredChoice([7] * 6, LENGTH), StoredChoice([8, EOS_TOKEN_ID], STOP)])
    assert engine.step() == [FinishEvent("a", STOP, Usage(prompt_tokens=9, completion_tokens=8))]


def test_beam_search_resumed_starts_from_the_prompt() -> None:
    engine = make_engine()
    engine.add_request(request := make_request(9, "a", use_beam_search=True, beam_width=3, n=3, max_tokens=7))
    for _ in range(3):
        engine.step()
    another = make_engine()
    another.add_request(request, [StoredChoice() for _ in range(3)])
    transcript = run_to_end(another)
    assert outputs(transcript, request) == [output for output, _ in expected_beams(request)]
