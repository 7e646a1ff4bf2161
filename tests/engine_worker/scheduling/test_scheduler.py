"""The scheduler's steps in exact numbers: token budget, order, chunks, admission, and preemption."""

from typing import Any

import pytest

from engine_worker.kv.preemption import HostTierConfig, PreemptionMode
from engine_worker.kv.sequence import Sequence, SequenceStatus
from engine_worker.scheduling.batch import ScheduledBatch, StepResult
from engine_worker.scheduling.scheduler import Scheduler, SchedulerConfig, SequenceUpdate
from engine_worker.scheduling.step_plan import MAX_PROMPT_LOGPROBS
from shared.messages import FinishReason
from tests.builders import EOS_TOKEN_ID, make_scheduler, make_sequence, preempted

WAITING, RUNNING, FINISHED = SequenceStatus.WAITING, SequenceStatus.RUNNING, SequenceStatus.FINISHED
TOKEN_ID = 77


def add(scheduler: Scheduler, name: str, num_prompt_tokens: int, **sampling: Any) -> Sequence:
    sequence = make_sequence(num_prompt_tokens, name, **{"max_tokens": 1000, **sampling})
    scheduler.add(sequence)
    return sequence


def plan(batch: ScheduledBatch) -> dict[str, tuple[int, int, bool]]:
    """Return {request id: (start, number of new tokens, samples)} in batch order."""
    return {item.sequence.request_id: (item.start, item.num_new_tokens, item.samples) for item in batch.sequences}


def answer(batch: ScheduledBatch, token_id: int = TOKEN_ID) -> StepResult:
    return StepResult([[token_id] if item.samples else None for item in batch.sequences])


def step(scheduler: Scheduler) -> dict[str, tuple[int, int, bool]]:
    batch = scheduler.schedule()
    scheduler.apply(batch, answer(batch))
    scheduler.check_integrity()
    return plan(batch)


def test_scheduler_prompt_is_chunked_and_samples_at_end() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8)
    sequence = add(scheduler, "a", 20)
    assert [step(scheduler) for _ in range(5)] == [
        {"a": (0, 8, False)},
        {"a": (8, 8, False)},
        {"a": (16, 4, True)},
        {"a": (20, 1, True)},
        {"a": (21, 1, True)},
    ]
    assert sequence.output_token_ids == [TOKEN_ID] * 3


def test_scheduler_allocates_all_prompt_blocks_at_admission() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8, block_size=4)
    sequence = add(scheduler, "a", 20)
    scheduler.schedule()
    assert len(sequence.kv.tables[0].blocks) == 5


def test_scheduler_decodes_continue_during_long_prefill() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8)
    add(scheduler, "a", 2)
    add(scheduler, "b", 3)
    assert step(scheduler) == {"a": (0, 2, True), "b": (0, 3, True)}
    add(scheduler, "long", 20)
    assert [step(scheduler) for _ in range(4)] == [
        {"a": (2, 1, True), "b": (3, 1, True), "long": (0, 6, False)},
        {"a": (3, 1, True), "b": (4, 1, True), "long": (6, 6, False)},
        {"a": (4, 1, True), "b": (5, 1, True), "long": (12, 6, False)},
        {"a": (5, 1, True), "b": (6, 1, True), "long": (18, 2, True)},
    ]


def test_scheduler_prompt_logprobs_per_step_are_capped() -> None:
    num_scored = MAX_PROMPT_LOGPROBS // 21
    scheduler = make_scheduler(num_blocks=4000, max_num_batched_tokens=8192, max_model_len=8192)
    add(scheduler, "first", 2 * num_scored + 5, prompt_logprobs=20)
    add(scheduler, "second", num_scored, prompt_logprobs=20)
    add(scheduler, "plain", 100)
    assert [step(scheduler) for _ in range(3)] == [
        {"first": (0, num_scored, False), "plain": (0, 100, True)},
        {"plain": (100, 1, True), "first": (num_scored, num_scored, False)},
        {"plain": (101, 1, True), "first": (2 * num_scored, 5, True), "second": (0, num_scored - 5, False)},
    ]


def test_scheduler_prompt_logprobs_below_cap_fill_a_step() -> None:
    scheduler = make_scheduler(num_blocks=4000, max_num_batched_tokens=8192, max_model_len=8192)
    add(scheduler, "a", 8000, prompt_logprobs=1)
    add(scheduler, "b", 192, prompt_logprobs=1)
    assert step(scheduler) == {"a": (0, 8000, True), "b": (0, 192, True)}


def test_scheduler_prefill_is_capped_only_beside_decodes() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=32, max_prefill_tokens_with_decodes=5)
    add(scheduler, "a", 12)
    assert step(scheduler) == {"a": (0, 12, True)}
    add(scheduler, "b", 7)
    add(scheduler, "c", 9)
    assert [step(scheduler) for _ in range(4)] == [
        {"a": (12, 1, True), "b": (0, 5, False)},
        {"a": (13, 1, True), "b": (5, 2, True), "c": (0, 3, False)},
        {"a": (14, 1, True), "b": (7, 1, True), "c": (3, 5, False)},
        {"a": (15, 1, True), "b": (8, 1, True), "c": (8, 1, True)},  # the last token of c costs as much as a decode
    ]


def test_scheduler_computes_prompts_oldest_first() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=10)
    for name in ("a", "b", "c"):
        add(scheduler, name, 12)
    assert [step(scheduler) for _ in range(4)] == [
        {"a": (0, 10, False)},
        {"a": (10, 2, True), "b": (0, 8, False)},
        {"a": (12, 1, True), "b": (8, 4, True), "c": (0, 5, False)},
        {"a": (13, 1, True), "b": (12, 1, True), "c": (5, 7, True)},
    ]


def test_scheduler_new_request_joins_next_step() -> None:
    scheduler = make_scheduler()
    add(scheduler, "a", 4)
    step(scheduler)
    add(scheduler, "b", 4)
    assert step(scheduler) == {"a": (4, 1, True), "b": (0, 4, True)}


def test_scheduler_full_slots_admit_after_one_ends() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    add(scheduler, "a", 4, max_tokens=2)
    add(scheduler, "b", 4)
    add(scheduler, "c", 4)
    assert list(step(scheduler)) == ["a", "b"]
    assert list(step(scheduler)) == ["a", "b"]  # a ends
    assert list(step(scheduler)) == ["b", "c"]


def test_scheduler_does_not_admit_past_a_blocked_sequence() -> None:
    scheduler = make_scheduler(num_blocks=9, block_size=4)
    add(scheduler, "a", 16)
    add(scheduler, "large", 16)
    add(scheduler, "small", 1)
    assert list(step(scheduler)) == ["a"]
    assert (scheduler.num_running, scheduler.num_waiting) == (1, 2)


@pytest.mark.parametrize(("num_prompt_tokens", "admitted"), [(8, True), (9, False)])
def test_scheduler_admission_reserves_block_per_sequence(num_prompt_tokens: int, admitted: bool) -> None:
    scheduler = make_scheduler(num_blocks=9, block_size=4)
    add(scheduler, "a", 16)  # 4 of 8 blocks
    add(scheduler, "b", num_prompt_tokens)  # 2 or 3 blocks; two of the remaining 4 must stay free
    assert ("b" in step(scheduler)) is admitted


def test_scheduler_admitted_sequence_runs_block_size_steps() -> None:
    scheduler = make_scheduler(num_blocks=9, block_size=4)
    add(scheduler, "a", 16)
    add(scheduler, "b", 8)
    preempted_at = next(number for number in range(100) if _step_preempts(scheduler))
    assert preempted_at == 1 + 4  # prompts in step 0, then block_size tokens each, then the next block edge


def _step_preempts(scheduler: Scheduler) -> bool:
    batch = scheduler.schedule()
    scheduler.apply(batch, answer(batch))
    return bool(preempted(scheduler, batch))


def test_scheduler_preempts_newest_and_puts_it_first() -> None:
    scheduler = make_scheduler(num_blocks=11, block_size=4, enable_prefix_caching=False)  # 10 usable blocks
    first, second, third = (add(scheduler, name, 8) for name in ("a", "b", "c"))
    while not preempted(scheduler, batch := scheduler.schedule()):
        scheduler.apply(batch, answer(batch))
    # a took the last free block, b those of c
    assert first.num_known_tokens == second.num_known_tokens == third.num_known_tokens == 13
    assert preempted(scheduler, batch) == [third.request_id]
    assert plan(batch) == {"a": (12, 1, True), "b": (12, 1, True)}
    assert (third.status, third.kv.tables[0].blocks, third.kv.num_computed_tokens, third.num_preemptions) == (
        WAITING,
        [],
        0,
        1,
    )
    assert third.output_token_ids == [TOKEN_ID] * 5
    add(scheduler, "d", 1)
    scheduler.apply(batch, answer(batch))
    scheduler.abort("a")
    assert step(scheduler) == {"b": (13, 1, True), "c": (0, 13, True)}  # c before d, in full
    assert third.output_token_ids == [TOKEN_ID] * 6


def test_scheduler_newest_needing_a_block_is_preempted() -> None:
    scheduler = make_scheduler(num_blocks=10, block_size=4)  # 9 usable blocks
    add(scheduler, "a", 5)
    add(scheduler, "b", 5)
    newest = add(scheduler, "c", 6)  # the first to need its next block
    while not preempted(scheduler, batch := scheduler.schedule()):
        scheduler.apply(batch, answer(batch))
    assert preempted(scheduler, batch) == [newest.request_id]
    assert newest.num_known_tokens == 13
    assert plan(batch) == {"a": (11, 1, True), "b": (11, 1, True)}


def test_scheduler_single_sequence_grows_until_cache_is_full() -> None:
    scheduler = make_scheduler(num_blocks=4, block_size=4, max_model_len=1000)  # 12 slots
    sequence = add(scheduler, "a", 5)
    updates: list[SequenceUpdate] = []
    while scheduler.num_running + scheduler.num_waiting:
        batch = scheduler.schedule()
        assert not preempted(scheduler, batch)
        updates += scheduler.apply(batch, answer(batch))
    assert sequence.num_tokens == 12
    assert [update.finish_reason for update in updates] == [None] * 6 + [FinishReason.LENGTH]


def test_scheduler_prompt_filling_cache_is_admitted_alone() -> None:
    scheduler = make_scheduler(num_blocks=4, block_size=4)  # 12 slots
    add(scheduler, "a", 1, max_tokens=1)
    add(scheduler, "b", 11)
    assert [step(scheduler), step(scheduler)] == [{"a": (0, 1, True)}, {"b": (0, 11, True)}]


def test_scheduler_sequence_exceeding_cache_is_not_added() -> None:
    with pytest.raises(AssertionError, match="could never"):
        add(make_scheduler(num_blocks=4, block_size=4), "a", 12)


def test_scheduler_ended_sequence_frees_blocks_in_apply() -> None:
    scheduler = make_scheduler()
    sequence = add(scheduler, "a", 6)
    batch = scheduler.schedule()
    assert scheduler.kv_cache_stats().num_active_blocks == 2
    (update,) = scheduler.apply(batch, answer(batch, EOS_TOKEN_ID))
    assert update == SequenceUpdate(sequence, [EOS_TOKEN_ID], FinishReason.STOP, ended_group=update.ended_group)
    assert update.ended_group is not None
    assert (sequence.status, scheduler.num_running, scheduler.kv_cache_stats().num_active_blocks) == (FINISHED, 0, 0)


def test_scheduler_chunk_without_sample_gives_no_update() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8)
    add(scheduler, "a", 9)
    batch = scheduler.schedule()
    assert scheduler.apply(batch, answer(batch)) == []


def test_scheduler_failure_in_prompt_ends_one_sequence() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8)
    first, second = add(scheduler, "a", 4), add(scheduler, "b", 20)
    batch = scheduler.schedule()
    updates = scheduler.apply(batch, StepResult([[TOKEN_ID], None], {"b": "broken"}))
    assert updates == [SequenceUpdate(first, [TOKEN_ID]), SequenceUpdate(second, error="broken")]
    assert (first.status, second.status) == (RUNNING, FINISHED)
    scheduler.check_integrity()
    assert step(scheduler) == {"a": (4, 1, True)}


def test_scheduler_missing_sample_is_detected() -> None:
    scheduler = make_scheduler()
    add(scheduler, "a", 4)
    with pytest.raises(AssertionError, match="neither a token nor a failure"):
        scheduler.apply(scheduler.schedule(), StepResult([None]))


def test_scheduler_abort_frees_at_once_in_any_state() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    running, _, waiting = (add(scheduler, name, 6) for name in ("a", "b", "c"))
    step(scheduler)
    for request_id in ("a", "a", "c", "unknown"):
        scheduler.abort(request_id)
    scheduler.check_integrity()
    assert (running.status, running.kv.tables[0].blocks, waiting.kv.tables[0].blocks) == (FINISHED, [], [])
    assert (scheduler.num_running, scheduler.num_waiting, scheduler.kv_cache_stats().num_active_blocks) == (1, 0, 2)


def test_scheduler_resumed_sequence_computes_prompt_and_journal() -> None:
    scheduler = make_scheduler()
    sequence = make_sequence(6, "a", output_token_ids=[50, 51, 52])
    scheduler.add(sequence)
    assert [step(scheduler), step(scheduler)] == [{"a": (0, 9, True)}, {"a": (9, 1, True)}]
    assert sequence.output_token_ids == [50, 51, 52, TOKEN_ID, TOKEN_ID]


@pytest.mark.parametrize(("mode", "num_running"), [(None, 2), (PreemptionMode.RECOMPUTE, 2), (PreemptionMode.SWAP, 3)])
def test_scheduler_admission_reserve_is_smaller_with_swap(mode: PreemptionMode | None, num_running: int) -> None:
    host_tier = None if mode is None else HostTierConfig(num_blocks=9, preemption_mode=mode)
    scheduler = make_scheduler(num_blocks=12, block_size=4, host_tier=host_tier)
    for name in "abc":
        add(scheduler, name, 11)  # 3 blocks of 11 each, so 2 would be left for 3 sequences
    step(scheduler)
    assert scheduler.num_running == num_running


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs: expected at least 1"),
        ({"max_num_seqs": 65}, "max_num_batched_tokens: expected at least max_num_seqs, 65"),
        ({"max_model_len": 1}, "max_model_len: expected at least 2"),
        ({"max_prefill_tokens_with_decodes": 0}, "max_prefill_tokens_with_decodes: expected at least 1"),
    ],
)
def test_scheduler_config_invalid_value_is_named(changes: dict[str, int], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        SchedulerConfig(**{"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 256, **changes})
