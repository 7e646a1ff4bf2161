"""sample_tokens on CUDA: launches of triton_kernels.py. Nothing waits for the device.

A batch of greedy rows takes one launch; others take two, plus one if a row has min-p, top-k or top-p.
"""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from kernels.sampling.reference import GROUP_SIZE, SamplingRows
from kernels.sampling.triton_kernels import argmax_kernel, draw_kernel, floor_kernel, group_kernel

# Measured on an H200 (bench/kernel/sampling.py). 4096 scores for 8 warps are two 16-byte loads per thread in bf16 and
# 12 programs for a row of 49152 tokens. A row's floor search has no other program on its SM to hide its loads.
_GROUPS_PER_TILE, _GROUP_WARPS = 32, 8
_FLOOR_GROUPS_PER_TILE, _FLOOR_WARPS = 32, 16
_DRAW_WARPS = 8
_ARGMAX_TILE, _ARGMAX_WARPS = 8192, 32


@dataclass(frozen=True, slots=True)
class GroupSums:
    best: Tensor  # [N, G] float32, largest score of each group
    mass: Tensor  # [N, G] float32, kept mass relative to the group's best; undefined in greedy rows
    floors: Tensor  # [N] float32, smallest kept score


def sample_tokens_triton(scores: Tensor, rows: SamplingRows | None) -> tuple[Tensor, Tensor]:
    """Compute sample_tokens() on CUDA."""
    num_rows, vocab_size = scores.shape
    assert scores.stride(1) == 1
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=scores.device)
    best = torch.empty(num_rows, dtype=torch.float32, device=scores.device)
    if rows is None:
        argmax_kernel[(num_rows,)](
            scores, token_ids, best, scores.stride(0), VOCAB=vocab_size, TILE=_ARGMAX_TILE, num_warps=_ARGMAX_WARPS
        )
        return token_ids, best
    sums = sum_groups(scores, rows)
    draw_kernel[(num_rows,)](
        scores,
        rows.seeds,
        rows.indices,
        rows.temperature,
        sums.best,
        sums.mass,
        sums.floors,
        token_ids,
        best,
        scores.stride(0),
        **_sizes(vocab_size),
        num_warps=_DRAW_WARPS,
    )
    return token_ids, best


def sum_groups(scores: Tensor, rows: SamplingRows) -> GroupSums:
    """Compute each group's best score and kept mass, and each row's smallest kept score."""
    num_rows, vocab_size = scores.shape
    num_groups, num_truncated = triton.cdiv(vocab_size, GROUP_SIZE), rows.truncated_rows.shape[0]
    best = torch.empty(num_rows, num_groups, dtype=torch.float32, device=scores.device)
    sums = GroupSums(best, torch.empty_like(best), best.new_empty(num_rows))
    group_kernel[(num_rows, triton.cdiv(num_groups, _GROUPS_PER_TILE))](
        scores,
        rows.temperature,
        sums.best,
        sums.mass,
        sums.floors,
        scores.stride(0),
        VOCAB=vocab_size,
        NUM_GROUPS=num_groups,
        GROUPS_PER_TILE=_GROUPS_PER_TILE,
        num_warps=_GROUP_WARPS,
    )
    if num_truncated:
        floor_kernel[(num_truncated,)](
            scores,
            rows.truncated_rows,
            rows.temperature,
            rows.log_min_p,
            rows.top_k,
            rows.top_p,
            sums.best,
            sums.mass,
            torch.empty(num_truncated, num_groups, dtype=torch.int32, device=scores.device),
            sums.floors,
            scores.stride(0),
            **_sizes(vocab_size),
            GROUPS_PER_TILE=_FLOOR_GROUPS_PER_TILE,
            num_warps=_FLOOR_WARPS,
        )
    return sums


def _sizes(vocab_size: int) -> dict[str, int]:
    num_groups = triton.cdiv(vocab_size, GROUP_SIZE)
    return {"VOCAB": vocab_size, "NUM_GROUPS": num_groups, "GROUPS_BLOCK": triton.next_power_of_2(num_groups)}
