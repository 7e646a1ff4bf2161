"""The Triton kernel of shared_gate.py: one program per row instead of five launches."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.dependent_launch import dependent_launch

_COLUMNS = 1024


@triton.jit
def _add_gated_kernel(
    outputs, shared, x, weight, out, SIZE: tl.constexpr, COLUMNS: tl.constexpr, DEPENDENT: tl.constexpr
):
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64) * SIZE
    columns = tl.arange(0, COLUMNS)
    products = tl.zeros((COLUMNS,), tl.float32)
    for first in tl.static_range(0, SIZE, COLUMNS):
        inside = first + columns < SIZE
        factor = tl.load(weight + first + columns, mask=inside, other=0.0).to(tl.float32)
        products += tl.load(x + row + first + columns, mask=inside, other=0.0).to(tl.float32) * factor
    gate = tl.sigmoid(tl.sum(products, 0))
    for first in tl.static_range(0, SIZE, COLUMNS):
        inside = first + columns < SIZE
        place = row + first + columns
        total = tl.load(outputs + place, mask=inside).to(tl.float32)
        total += tl.load(shared + place, mask=inside).to(tl.float32) * gate
        tl.store(out + place, total.to(out.dtype.element_ty), mask=inside)


def add_gated_triton(outputs: Tensor, shared: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    assert outputs.is_contiguous() and shared.is_contiguous() and x.is_contiguous() and weight.is_contiguous()
    num_rows, size = outputs.shape
    out = torch.empty_like(outputs)
    _add_gated_kernel[(num_rows,)](
        outputs, shared, x, weight, out, SIZE=size, COLUMNS=_COLUMNS, num_warps=4, **dependent_launch(x)
    )
    return out
