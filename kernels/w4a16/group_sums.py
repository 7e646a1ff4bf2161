"""Sums of the inputs of each group, which the minima of 4-bit weights are multiplied with."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.dependent_launch import dependent_launch

_INPUTS = 2048  # of a program


@triton.jit
def _group_sums_kernel(x, sums, num_groups, stride, GROUP: tl.constexpr, GROUPS: tl.constexpr, DEPENDENT: tl.constexpr):
    """Run program (row, groups)."""
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    inputs = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = group < num_groups
    values = tl.load(x + row * (num_groups * GROUP) + inputs, mask=inside[:, None], other=0.0).to(tl.float32)
    tl.store(sums + group * stride + row, tl.sum(values, axis=1), mask=inside)


def group_sums(x: Tensor, group: int, columns: int) -> Tensor:
    """Return float32 sums [K / group, columns]: of the groups of each row of x [T, K], then uninitialized columns."""
    num_rows, num_inputs = x.shape
    num_groups, at_once = num_inputs // group, _INPUTS // group
    sums = x.new_empty(num_groups, columns, dtype=torch.float32)
    _group_sums_kernel[num_rows, triton.cdiv(num_groups, at_once)](
        x, sums, num_groups, columns, GROUP=group, GROUPS=at_once, **dependent_launch(x)
    )
    return sums
