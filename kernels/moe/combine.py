"""The weighted sum of the experts' results of each token, in float32 and in one order."""

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.dependent_launch import dependent_launch
from kernels.moe.routing import Routing

_ELEMENTS = 8192  # of a program


@triton.jit(do_not_specialize=["first_owned", "end_owned"])
def _combine_kernel(
    results, ids, weights, positions, output, first_owned, end_owned,
    WIDTH: tl.constexpr, TOP_K: tl.constexpr, SLOTS: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Add BLOCK columns of a token. All rows are requested at once: one after the other, each would wait for memory."""
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slots = tl.arange(0, SLOTS)
    place = token * TOP_K + slots
    experts = tl.load(ids + place, mask=slots < TOP_K, other=-1)
    rows = tl.load(positions + place, mask=slots < TOP_K, other=0).to(tl.int64)
    factors = tl.load(weights + place, mask=slots < TOP_K, other=0.0)
    is_owned = (experts >= first_owned) & (experts < end_owned)
    inside = is_owned[:, None] & (columns < WIDTH)[None, :]
    each = tl.load(results + rows[:, None] * WIDTH + columns[None, :], mask=inside, other=0.0)
    total = tl.sum(each.to(tl.float32) * factors[:, None], axis=0)
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
        slots = triton.next_power_of_2(top_k)
        block = max(_ELEMENTS // slots, 256)
        grid = (num_tokens, triton.cdiv(width, block))
        _combine_kernel[grid](
            results, routing.ids, routing.weights, routing.positions, output, routing.owned.start, routing.owned.stop,
            WIDTH=width, TOP_K=top_k, SLOTS=slots, BLOCK=block, num_warps=4, **dependent_launch(results),
        )  # fmt: skip
    return output
