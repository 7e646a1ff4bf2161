"""The warmup runs each form of a step once, within the step's bounds."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from engine_worker.execution.load.warmup import warm_up
from engine_worker.execution.settings import StepBounds
from engine_worker.execution.step.model_runner import ModelRunner
from engine_worker.execution.step.persistent_inputs import padded_logit_rows
from engine_worker.scheduling.batch import ScheduledBatch, synthetic_batch
from kernels.attention.decode_shares import H200_CONFIGS, share_config


class RecordingRunner:
    """Has the sizes of a runner and records its batches."""

    max_model_len, num_blocks, block_size, num_state_blocks = 2048, 1000, 16, 0
    model_spec = SimpleNamespace(vocab_size=1000)

    def __init__(self, device_type: str) -> None:
        self.device_type = device_type
        self.batches: list[ScheduledBatch] = []

    def synthetic_batch(self, *sizes: Any) -> ScheduledBatch:
        num_sequences, start, num_new_tokens, *sampling = sizes
        return synthetic_batch(num_sequences, start, num_new_tokens, self.block_size, *sampling)

    def execute(self, batch: ScheduledBatch) -> None:
        self.batches.append(batch)


def warmed_up(device_type: str, **bounds: int) -> list[ScheduledBatch]:
    runner: Any = RecordingRunner(device_type)
    progress = [done for done, _ in warm_up(cast(ModelRunner, runner), StepBounds(**bounds))]
    assert progress[-1] == 1.0 and progress == sorted(progress)
    batches: list[ScheduledBatch] = runner.batches
    return batches


def num_prompts(batch: ScheduledBatch) -> int:
    return sum(sequence.num_new_tokens > 1 for sequence in batch.sequences)


def test_warmup_runs_every_decode_kernel_form() -> None:
    batches = warmed_up("cuda", max_num_seqs=256, max_num_batched_tokens=8192)
    for prompts in (0, 1):
        sizes = [len(one.sequences) for one in batches if num_prompts(one) == prompts and len(one.sequences) > prompts]
        assert {share_config(size) for size in sizes} == {config for _, config in H200_CONFIGS}, prompts


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
@pytest.mark.parametrize(("max_num_seqs", "max_num_batched_tokens"), [(1, 1), (1, 16), (2, 2), (3, 64), (64, 65)])
def test_warmup_steps_stay_within_bounds(device_type: str, max_num_seqs: int, max_num_batched_tokens: int) -> None:
    bounds = {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": max_num_batched_tokens}
    for batch in warmed_up(device_type, **bounds):
        assert len(batch.sequences) <= max_num_seqs and batch.num_tokens <= max_num_batched_tokens


def test_warmup_samples_every_padded_number_of_rows() -> None:
    """Each loads other kernels of the library; a row count without a step would stop the host in a burst."""
    batches = warmed_up("cuda", max_num_seqs=1024, max_num_batched_tokens=8192)
    with_prompts = {len(batch.sequences) for batch in batches if num_prompts(batch)}
    assert {padded_logit_rows(count) for count in range(1, 1025)} <= with_prompts
    assert max(batch.num_tokens for batch in batches) == 8192
    fewer = warmed_up("cuda", max_num_seqs=200, max_num_batched_tokens=2048)
    assert max(batch.num_tokens for batch in fewer) == 2048 and max(len(batch.sequences) for batch in fewer) == 200


def test_logit_rows_are_padded_to_few_numbers() -> None:
    assert [padded_logit_rows(count) for count in (0, 1, 3, 65, 256, 257, 1000)] == [0, 1, 4, 128, 256, 384, 1024]
