"""Run the shapes of typical steps once, so that no request waits for kernels that compile or load at first use.

The steps are real ones on synthetic sequences, with KV in free blocks. Nothing compiles on a CPU, where one step of
each kind checks that the model runs; the shapes of a GPU would take 5 of the 8 s of a start with SmolLM2-135M there.
"""

from collections.abc import Iterator
from dataclasses import replace

from engine_worker.execution.load.step_memory import everything
from engine_worker.execution.settings import StepBounds
from engine_worker.execution.step.model_runner import ModelRunner
from engine_worker.kv.transfers import BlockCopy, Moves, Transfers
from engine_worker.scheduling.batch import ScheduledBatch

_PREFILL_TOKENS = {"cpu": 32, "cuda": 512}
_DECODE_SIZES = {"cpu": (1,), "cuda": (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)}
_DECODE_LENGTH_TOKENS = 32
# Decodes beside a prompt use other variants of the decode kernel, by the number of sequences (decode_shares.py).
_MIXED_SIZES = {"cpu": (), "cuda": (2, 16, 64)}  # sequences, one of which has a part of a prompt
_MIXED_PREFILL_TOKENS = 32
# Tokens and samples of steps without a graph. cuBLAS loads another kernel for each range of rows.
# Most layers have a row for each token. The last layer and the head have one for each sample, and pad to these numbers
# (persistent_inputs.py). The largest step comes first, so that its memory stays in the allocator's cache.
_BURSTS = {
    "cpu": (),
    "cuda": (
        (8192, 1024), (4096, 896), (2048, 768),
        *((1280, samples) for samples in (640, 512, 384, 256, 192, 128, 64, 32, 16, 8, 4, 2, 1)),
    ),
}  # fmt: skip


def warm_up(runner: ModelRunner, bounds: StepBounds) -> Iterator[tuple[float, str]]:
    """Run the steps.

    Yields:
        Progress from 0 to 1, and a description of the step.
    """
    longest = min(runner.max_model_len, (runner.num_blocks - 1) * runner.block_size)
    prefill = min(bounds.max_num_batched_tokens, longest, _PREFILL_TOKENS[runner.device_type])
    batches = [runner.synthetic_batch(1, 0, prefill)]
    decode_length = min(_DECODE_LENGTH_TOKENS, longest)
    first, *sizes = [size for size in _DECODE_SIZES[runner.device_type] if size <= bounds.max_num_seqs]
    # Kernels for rare features: a block copy, and all sampling parameters.
    rare = runner.synthetic_batch(first, decode_length - 1, 1, everything(runner.model_spec.vocab_size))
    states = [BlockCopy(0, runner.num_state_blocks - 1)] if runner.num_state_blocks else []
    copies = Moves(copies=[BlockCopy(1, runner.num_blocks - 1)]), Moves(copies=states)
    batches.append(replace(rare, transfers=Transfers(*copies)))
    batches += [runner.synthetic_batch(size, decode_length - 1, 1) for size in sizes]
    batches += _mixed_batches(runner, bounds, decode_length)
    batches += _burst_batches(runner, bounds, decode_length)
    for number, batch in enumerate(batches, start=1):
        runner.execute(batch)
        yield number / len(batches), f"{len(batch.sequences)} sequences, {batch.num_tokens} tokens"


def _mixed_batches(runner: ModelRunner, bounds: StepBounds, decode_length: int) -> Iterator[ScheduledBatch]:
    for size in _MIXED_SIZES[runner.device_type]:
        prefill = min(_MIXED_PREFILL_TOKENS, decode_length, bounds.max_num_batched_tokens - (size - 1))
        if size <= bounds.max_num_seqs and prefill > 1:  # one token would be one more decode
            decodes = runner.synthetic_batch(size - 1, decode_length - 1, 1).sequences
            prompt = runner.synthetic_batch(1, 0, prefill).sequences
            yield ScheduledBatch([*decodes, *prompt])


def _burst_batches(runner: ModelRunner, bounds: StepBounds, decode_length: int) -> Iterator[ScheduledBatch]:
    """Yield full steps of prompts beside decodes, as after a start for which clients have waited."""
    longest = min(runner.max_model_len, (runner.num_blocks - 1) * runner.block_size)
    within = [
        (min(tokens, bounds.max_num_batched_tokens), min(samples, bounds.max_num_seqs))
        for tokens, samples in _BURSTS[runner.device_type]
    ]
    for num_tokens, wanted in dict.fromkeys(within):
        num_samples = min(wanted, num_tokens)
        num_decodes = max(0, num_samples - -(-num_tokens // longest))
        batch = runner.synthetic_batch(num_decodes, decode_length - 1, 1).sequences
        num_prompts = min(num_samples, -(-(num_tokens - num_decodes) // longest))
        for prompt in range(num_prompts):
            num_left = num_tokens - num_decodes - prompt * longest
            batch += runner.synthetic_batch(1, 0, min(num_left, longest)).sequences
        yield ScheduledBatch(batch)
