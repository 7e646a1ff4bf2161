"""Runs the shapes of typical steps once, so that the first request does not pay for kernels compiled at first use.

On a CPU nothing is compiled, and a shape's first step takes as long as its second: a step of each kind shows that the
model runs. The shapes of a GPU would be 5 of the 8 s that a worker of SmolLM2-135M takes to start on one thread.

Decodes beside a prompt are steps of their own: there the decode kernel of a Hopper GPU is another one, in each of its
forms by the number of sequences (kernels/attention/decode_shares.py), and it would stop all streams for a second.

The steps are real ones on made-up sequences; their KV lies in blocks that nobody owns yet and nobody will read. One
has what few requests ask for, a mask of tokens and a block's copy: their kernels would else be compiled while all wait.

It is the last phase of a worker's start. It knows no request; what it computes is thrown away.
"""

from collections.abc import Iterator
from dataclasses import replace

from engine_worker.execution.model_runner import ModelRunner
from engine_worker.execution.settings import StepBounds
from engine_worker.scheduling.batch import BlockCopy, ScheduledBatch, made_up_batch

_PREFILL_TOKENS = {"cpu": 32, "cuda": 512}
_DECODE_SIZES = {"cpu": (1,), "cuda": (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)}
_DECODE_LENGTH_TOKENS = 32
_MIXED_SIZES = {"cpu": (), "cuda": (2, 16, 64)}  # sequences, of which one has a piece of a prompt
_MIXED_PREFILL_TOKENS = 32


def warm_up(runner: ModelRunner, bounds: StepBounds) -> Iterator[tuple[float, str]]:
    """Yields progress 0..1 and what was run."""
    longest = min(runner.max_model_len, (runner.num_blocks - 1) * runner.block_size)
    prefill = min(bounds.max_num_batched_tokens, longest, _PREFILL_TOKENS[runner.device_type])
    batches = [made_up_batch(1, 0, prefill, runner.block_size)]
    decode_length = min(_DECODE_LENGTH_TOKENS, longest)
    first, *sizes = [size for size in _DECODE_SIZES[runner.device_type] if size <= bounds.max_num_seqs]
    rare = made_up_batch(first, decode_length - 1, 1, runner.block_size, allowed_token_ids=(0,))
    batches.append(replace(rare, block_copies=[BlockCopy(1, runner.num_blocks - 1)]))
    batches += [made_up_batch(size, decode_length - 1, 1, runner.block_size) for size in sizes]
    batches += _mixed_batches(runner, bounds, decode_length)
    for number, batch in enumerate(batches, start=1):
        runner.execute(batch)
        yield number / len(batches), f"{len(batch.sequences)} sequences, {batch.num_tokens} tokens"


def _mixed_batches(runner: ModelRunner, bounds: StepBounds, decode_length: int) -> Iterator[ScheduledBatch]:
    for size in _MIXED_SIZES[runner.device_type]:
        prefill = min(_MIXED_PREFILL_TOKENS, decode_length, bounds.max_num_batched_tokens - (size - 1))
        if size <= bounds.max_num_seqs and prefill > 1:  # one token would be one more decode
            decodes = made_up_batch(size - 1, decode_length - 1, 1, runner.block_size).sequences
            prompt = made_up_batch(1, 0, prefill, runner.block_size).sequences
            yield ScheduledBatch([*decodes, *prompt])
