"""The weighted sum of the experts' results of each token, in float32 and in ascending expert order."""

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.dependent_launch import dependent_launch
from kernels.moe.routing import Routing

_BLOCK = 1024  # 8 elements for each thread of 4 warps: one 16-byte load in bf16


@triton.jit(do_not_specialize=["first_owned", "end_owned"])
def _combine_kernel(
    results, ids, weights, positions, output, first_owned, end_owned,
    WIDTH: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for slot in tl.static_range(TOP_K):
        place = token * TOP_K + slot
        expert = tl.load(ids + place)
        is_owned = (expert >= first_owned) & (expert < end_owned)
        row = tl.load(positions + place).to(tl.int64)
        result = tl.load(results + row * WIDTH + columns, mask=(columns < WIDTH) & is_owned, other=0.0)
        total += result.to(tl.float32) * tl.load(weights + place)
    tl.store(output + token * WIDTH + columns, total.to(output.dtype.element_ty), mask=columns < WIDTH)


def combine(results: Tensor, routing: Routing) -> Tensor:
    """Add the results of each token's owned experts, times their weights.

    Args:
        results: [T * k, H], sorted by (expert, token).
        routing: From route().

    Returns:
        [T, H], dtype of results.
    """
    num_tokens, top_k = routing.ids.shape
    width = results.shape[1]
    output = results.new_empty(num_tokens, width)
    if num_tokens:
        grid = (num_tokens, triton.cdiv(width, _BLOCK))
        _combine_kernel[grid](
            results, routing.ids, routing.weights, routing.positions, output, routing.owned.start, routing.owned.stop,
            WIDTH=width, TOP_K=top_k, BLOCK=_BLOCK, num_warps=4, **dependent_launch(results),
        )  # fmt: skip
    return output
