"""The torch reference of sample_tokens.py, which serves CPU tensors, and the types shared with the kernels."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.sampling.counter_based_noise import draw_keys, gumbel_noise

# Tokens per group of the two-level draw. It is part of the result: another value draws other tokens for the same seed.
# 128 divides common vocabularies (128256, 151936, 49152), so their logits need no padding.
GROUP_SIZE = 128


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """Sampling parameters per row, on the device of the scores. Rows with temperature 0 take the argmax."""

    seeds: Tensor  # [N] int64
    indices: Tensor  # [N] int64, index of the token in its sequence's output
    temperature: Tensor  # [N] float64, 0 or at least 1e-30, below which a division overflows float32
    log_min_p: Tensor  # [N] float64; -inf: off
    top_k: Tensor  # [N] int64; 0: off
    top_p: Tensor  # [N] float64; 1: off
    random_rows: Tensor  # [R] int64: rows whose temperature is not 0
    truncated_rows: Tensor  # [Q] int64: random rows with min-p, top-k or top-p


def sample_tokens_reference(scores: Tensor, rows: SamplingRows | None) -> tuple[Tensor, Tensor]:
    scores = scores.float()
    best, token_ids = scores.max(dim=-1)
    if rows is None:
        return token_ids, best
    drawn = _draw(scores[rows.random_rows], best[rows.random_rows, None], _selected(rows, rows.random_rows))
    return token_ids.index_copy(0, rows.random_rows, drawn), best


def _selected(rows: SamplingRows, chosen: Tensor) -> SamplingRows:
    everyone = torch.arange(chosen.shape[0], device=chosen.device)
    return SamplingRows(
        seeds=rows.seeds[chosen],
        indices=rows.indices[chosen],
        temperature=rows.temperature[chosen],
        log_min_p=rows.log_min_p[chosen],
        top_k=rows.top_k[chosen],
        top_p=rows.top_p[chosen],
        random_rows=everyone,
        truncated_rows=everyone[torch.isin(chosen, rows.truncated_rows)],
    )


def _draw(scores: Tensor, best: Tensor, rows: SamplingRows) -> Tensor:
    """Draw one token id per row of `scores`, which is overwritten; `best` [R, 1] is each row's maximum."""
    log_weights = scores.sub_(best).div_(rows.temperature.float()[:, None])
    weights = log_weights.exp()
    floor = _floor(log_weights, weights, rows) if rows.truncated_rows.shape[0] else None
    if floor is not None:
        weights.mul_(log_weights >= floor)

    groups = _groups(weights)
    log_weights = _padded(log_weights, -math.inf)
    keys = draw_keys(rows.seeds, rows.indices)
    group_ids = torch.arange(groups.shape[1], device=scores.device).expand(scores.shape[0], -1)
    group = (groups.sum(dim=-1).log() + gumbel_noise(keys, 0, group_ids)).argmax(dim=-1, keepdim=True)
    token_ids = group * GROUP_SIZE + torch.arange(GROUP_SIZE, device=scores.device)
    kept = log_weights.gather(1, token_ids)
    if floor is not None:
        kept = kept.masked_fill(kept < floor, -math.inf)
    within = (kept + gumbel_noise(keys, 1, token_ids)).argmax(dim=-1, keepdim=True)
    # A row that cannot be sampled is NaN everywhere, and its argmax may lie in the padding.
    return token_ids.gather(1, within).squeeze(1).clamp_(max=scores.shape[1] - 1)


def _groups(weights: Tensor) -> Tensor:
    """Return weights as [R, groups, GROUP_SIZE].

    Sums over a vocabulary are sums of group sums: torch splits a single long row among threads, so its last bits would
    differ from those of the same row in a batch.
    """
    return _padded(weights, 0.0).view(len(weights), -1, GROUP_SIZE)


def _padded(rows: Tensor, value: float) -> Tensor:
    padding = -rows.shape[1] % GROUP_SIZE
    return torch.nn.functional.pad(rows, (0, padding), value=value) if padding else rows


def _floor(log_weights: Tensor, weights: Tensor, rows: SamplingRows) -> Tensor:
    """Return the smallest log weight [R, 1] kept by min-p, top-k and top-p; -inf in rows without them."""
    floor = rows.log_min_p.float()[:, None]
    sorting = ((rows.top_k > 0) | (rows.top_p < 1.0)).nonzero().squeeze(1)
    if sorting.shape[0]:
        vocab_size = log_weights.shape[1]
        top_k, top_p = rows.top_k[sorting, None], rows.top_p[sorting, None]
        mass = _groups(weights[sorting]).sum(dim=-1).sum(dim=-1, keepdim=True)
        top_k = torch.where(top_k == 0, vocab_size, top_k)
        floor[sorting] = _prefix_floor(log_weights[sorting], mass, floor[sorting], top_k, top_p)
    return floor


def _prefix_floor(
    log_weights: Tensor, mass: Tensor, floor: Tensor, top_k: Tensor, top_p: Tensor, num_sorted: int = 128
) -> Tensor:
    """Raise `floor` by top-k, then by top-p of the rest.

    It sorts the `num_sorted` largest, then eight times as many for undecided rows. A CPU needs 3.5 ms to sort a row of
    49152 but 0.07 ms for its 128 largest, and a nucleus is rarely larger.
    """
    vocab_size = log_weights.shape[1]
    num_sorted = min(num_sorted, vocab_size)
    largest = log_weights.topk(num_sorted, dim=-1).values.double()
    kth = largest.gather(1, top_k.clamp(max=num_sorted) - 1)
    floor = torch.where(top_k <= num_sorted, torch.maximum(floor, kth.to(floor.dtype)), floor)
    left = largest >= floor
    left_weights = largest.exp() * left
    # Without top-k and min-p the whole row remains, and its mass is known before sorting.
    whole_row = (top_k >= vocab_size) & (floor == -math.inf)
    total = torch.where(whole_row, mass.double(), left_weights.sum(dim=-1, keepdim=True))
    before = left_weights.cumsum(dim=-1) - left_weights
    kept = left & ((top_p >= 1.0) | (before < top_p * total))
    kept[:, 0] = True  # top_p = 0 still keeps the best token
    result = largest.masked_fill(~kept, math.inf).amin(dim=-1, keepdim=True).to(floor.dtype)

    undecided = torch.where(whole_row, kept[:, -1:], left[:, -1:])
    if num_sorted < vocab_size and undecided.any():
        rows = undecided.squeeze(1).nonzero().squeeze(1)
        result[rows] = _prefix_floor(
            log_weights[rows], mass[rows], floor[rows], top_k[rows], top_p[rows], 8 * num_sorted
        )
    return result
