"""Runs the shapes of typical steps once, so that the first request does not pay for kernels compiled at first use.

The steps are real ones on made-up sequences; their KV lies in blocks that nobody owns yet and nobody will read.

It is the last phase of a worker's start. It knows no request; what it computes is thrown away.
"""

from collections.abc import Iterator

from engine_worker.execution.model_runner import ModelRunner
from engine_worker.execution.settings import StepBounds
from engine_worker.scheduling.batch import ScheduledBatch, ScheduledSequence
from engine_worker.scheduling.sequence import Sequence
from shared.messages import SamplingParams

_DECODE_LENGTH_TOKENS = 32


def warm_up(runner: ModelRunner, bounds: StepBounds) -> Iterator[tuple[float, str]]:
    """Yields progress 0..1 and what was run."""
    longest = min(runner.max_model_len, (runner.num_blocks - 1) * runner.block_size)
    prefill = min(bounds.max_num_batched_tokens, longest, 512)
    batches = [made_up_batch(1, 0, prefill, runner)]
    decode_length = min(_DECODE_LENGTH_TOKENS, longest)
    sizes = [size for size in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64) if size <= bounds.max_num_seqs]
    batches += [made_up_batch(size, decode_length - 1, 1, runner) for size in sizes]
    for number, batch in enumerate(batches, start=1):
        runner.execute(batch)
        yield number / len(batches), f"{len(batch.sequences)} sequences, {batch.num_tokens} tokens"


def made_up_batch(num_sequences: int, start: int, num_new_tokens: int, runner: ModelRunner) -> ScheduledBatch:
    """A step of sequences that all share the first blocks of the pool."""
    num_tokens = start + num_new_tokens
    block_table = list(range(1, -(-num_tokens // runner.block_size) + 1))
    sampling = SamplingParams(max_tokens=1, seed=0, temperature=0.0)
    return ScheduledBatch(
        [
            ScheduledSequence(
                Sequence("warmup", [0] * num_tokens, sampling, block_table=block_table),
                start=start,
                num_new_tokens=num_new_tokens,
                samples=True,
            )
            for _ in range(num_sequences)
        ]
    )
