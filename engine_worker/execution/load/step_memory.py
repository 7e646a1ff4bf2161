"""Measure the memory of the largest step on CUDA, by running one before the KV pool exists.

The step has the maximum of prompt tokens and samples the maximum of sequences, with every parameter that needs memory.
All its KV is written to one block, and its results are dropped.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from engine_worker.execution.sampling.beam_candidates import launch_beam_candidates
from engine_worker.execution.sampling.sampler import Sampler
from engine_worker.execution.settings import StepBounds
from engine_worker.execution.step.kv_cache import KVCache
from engine_worker.model.model_input import ModelInput
from engine_worker.model.served_model import ServedModel
from engine_worker.model.spec import kv_layout
from engine_worker.scheduling.batch import synthetic_batch
from shared.messages import MAX_LOGPROBS, SamplingParams

MAX_BEAM_WIDTH = 64  # of the API
_MAX_NAMED_TOKENS = 128  # upper bound of named tokens in a request's log-probabilities


@torch.inference_mode()
def measure_step_bytes(
    model: ServedModel,
    kv_dtype: str,
    sample: Callable[[Tensor, int], object] | None,
    device: torch.device,
    bounds: StepBounds,
    max_model_len: int,
) -> int:
    """Return the peak of allocated memory over the current one, in bytes. Empties the allocator's cache.

    Args:
        model: The loaded model.
        kv_dtype: Type of the KV cache.
        sample: Called with the step's logits and the block size; None on a rank that does not sample.
        device: A CUDA device.
        bounds: The limits of a step.
        max_model_len: Maximum of prompt and output, in tokens.
    """
    block_size = 16
    layout = kv_layout(model.spec, block_size, kv_dtype)
    num_groups = len(layout.groups)
    kv_cache = KVCache(layout, 1, device, num_state_blocks=1)
    attached = model.attach(kv_cache.pool, layout.places, kv_cache.states)
    model_input = _model_input(device, bounds, max_model_len, block_size, num_groups)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    logits = model.forward(model_input, attached)
    if sample is not None:
        sample(logits, block_size)
    peak = torch.cuda.max_memory_allocated(device) - before
    del logits, model_input, attached, kv_cache
    torch.cuda.empty_cache()
    return int(peak)


def sample_largest(sampler: Sampler, logits: Tensor, block_size: int) -> None:
    """Sample N synthetic sequences from `logits` [N, V] with all parameters that need memory, and as N beams."""
    num_rows, vocab_size = logits.shape
    # Masks of grammars take as much memory as those of allowed tokens.
    masks = torch.empty(num_rows, -(-vocab_size // 32), dtype=torch.int32, device=logits.device)
    batch = synthetic_batch(num_rows, 0, 1, block_size, everything(vocab_size))
    sampler.sample(logits, [scheduled.sequence for scheduled in batch.sequences])
    width = min(MAX_BEAM_WIDTH, num_rows)
    searching = SamplingParams(max_tokens=1, seed=0, temperature=0.0, use_beam_search=True, beam_width=width)
    beams = [scheduled.sequence for scheduled in synthetic_batch(num_rows, 0, 1, block_size, searching).sequences]
    for row, beam in enumerate(beams):
        beam.request_id = str(row // width)
    launch_beam_candidates(logits, beams).collect()
    del masks


def everything(vocab_size: int) -> SamplingParams:
    """Return sampling parameters with which a row needs the maximum of memory."""
    some = tuple(range(min(_MAX_NAMED_TOKENS, vocab_size)))
    return SamplingParams(
        max_tokens=2,
        seed=0,
        temperature=1.0,
        top_p=0.9,
        top_k=min(50, vocab_size),
        min_p=0.01,
        min_tokens=1,
        stop_token_ids=some[:4],
        repetition_penalty=1.1,
        presence_penalty=0.1,
        frequency_penalty=0.1,
        logit_bias=dict.fromkeys(some, 0.1),
        allowed_token_ids=some,
        logprobs=MAX_LOGPROBS,
    )


def _model_input(
    device: torch.device, bounds: StepBounds, max_model_len: int, block_size: int, num_groups: int
) -> ModelInput:
    """Return prompts of the model's maximum length, and a last one with the remaining tokens."""
    num_tokens = bounds.max_num_batched_tokens
    lens = [max_model_len] * (num_tokens // max_model_len)
    lens += [rest] if (rest := num_tokens % max_model_len) else []
    ends = torch.tensor(lens).cumsum(0)
    positions = torch.cat([torch.arange(length) for length in lens])
    return ModelInput(
        token_ids=torch.zeros(num_tokens, dtype=torch.int64, device=device),
        positions=positions.to(device),
        slot_mapping=torch.zeros((num_groups, num_tokens), dtype=torch.int64, device=device),
        query_start_loc=torch.cat((torch.zeros(1, dtype=torch.int64), ends)).to(device, torch.int32),
        seq_lens=torch.tensor(lens, dtype=torch.int32, device=device),
        block_tables=torch.zeros(
            (num_groups, len(lens), -(-max(lens) // block_size)), dtype=torch.int32, device=device
        ),
        logits_indices=torch.arange(min(bounds.max_num_samples, num_tokens), device=device),
        max_query_len=max(lens),
        max_seq_len=max(lens),
        state_blocks=torch.zeros(len(lens), dtype=torch.int32, device=device),
    )
