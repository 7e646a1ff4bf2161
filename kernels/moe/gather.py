"""Copy rows of tokens into the sorted order of their pairs, for products that read them by TMA."""

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.dependent_launch import dependent_launch
from kernels.moe.routing import Routing

_BLOCK = 4096  # 32 elements for each thread of 4 warps


@triton.jit
def _gather_rows_kernel(
    x, pairs, output, WIDTH: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr
):
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(pairs + row).to(tl.int64) // TOP_K
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + token * WIDTH + columns, mask=columns < WIDTH)
    tl.store(output + row * WIDTH + columns, values, mask=columns < WIDTH)


def gather_rows(x: Tensor, routing: Routing) -> Tensor:
    """Return the row of x [T, H] of each pair, [T * k, H], sorted by (expert, token)."""
    width = x.shape[1]
    output = x.new_empty(routing.num_pairs, width)
    grid = (routing.num_pairs, triton.cdiv(width, _BLOCK))
    _gather_rows_kernel[grid](
        x, routing.pairs, output, WIDTH=width, TOP_K=routing.ids.shape[1], BLOCK=_BLOCK, num_warps=4,
        **dependent_launch(x),
    )  # fmt: skip
    return output
