"""The memory of the largest step on CUDA beside weights and KV, measured by running one before the KV pool exists.

The step has as many prompt tokens as the budget allows, and samples as many sequences as there are running slots, with
every parameter that takes memory. Its KV goes to one block over and over; nobody reads what it answers.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from engine_worker.execution.beam_candidates import launch_beam_candidates
from engine_worker.execution.kv_cache import KVCache
from engine_worker.execution.sampler import Sampler
from engine_worker.execution.settings import StepBounds
from engine_worker.model.model_input import ModelInput
from engine_worker.model.served_model import ServedModel
from engine_worker.model.spec import kv_layout
from engine_worker.scheduling.batch import synthetic_batch
from shared.messages import MAX_LOGPROBS, SamplingParams

MAX_BEAM_WIDTH = 64  # of the API
_MAX_NAMED_TOKENS = 128  # as many logprobs of named tokens, or more, as a request asks for


@torch.inference_mode()
def measure_step_bytes(
    model: ServedModel,
    kv_dtype: str,
    sample: Callable[[Tensor, int], object] | None,
    device: torch.device,
    bounds: StepBounds,
    max_model_len: int,
) -> int:
    """The peak of allocated memory over what is allocated now. Leaves the allocator's cache empty.

    `sample` is given the step's logits and the block size; None on a rank that samples nothing.
    """
    block_size = 16
    layout = kv_layout(model.spec, block_size, kv_dtype)
    kv_cache = KVCache(layout, 1, device)
    attached = model.attach(kv_cache.pool)
    model_input = _model_input(device, bounds, max_model_len, block_size)
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
    """Sample made-up sequences of `logits` [N, V] with all that takes memory, and search by beams in as many rows."""
    num_rows, vocab_size = logits.shape
    # Those of grammars take as much again as those of allowed tokens.
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
    """Return parameters that make a row take all the memory that sampling can take."""
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


def _model_input(device: torch.device, bounds: StepBounds, max_model_len: int, block_size: int) -> ModelInput:
    """Prompts as long as the model allows, and a last one with the rest."""
    num_tokens = bounds.max_num_batched_tokens
    lens = [max_model_len] * (num_tokens // max_model_len)
    lens += [rest] if (rest := num_tokens % max_model_len) else []
    ends = torch.tensor(lens).cumsum(0)
    positions = torch.cat([torch.arange(length) for length in lens])
    return ModelInput(
        token_ids=torch.zeros(num_tokens, dtype=torch.int64, device=device),
        positions=positions.to(device),
        slot_mapping=torch.zeros(num_tokens, dtype=torch.int64, device=device),
        query_start_loc=torch.cat((torch.zeros(1, dtype=torch.int64), ends)).to(device, torch.int32),
        seq_lens=torch.tensor(lens, dtype=torch.int32, device=device),
        block_tables=torch.zeros((len(lens), -(-max(lens) // block_size)), dtype=torch.int32, device=device),
        logits_indices=torch.arange(min(bounds.max_num_seqs, num_tokens), device=device),
        max_query_len=max(lens),
        max_seq_len=max(lens),
    )
