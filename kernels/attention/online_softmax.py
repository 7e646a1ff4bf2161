"""The online softmax of the attention kernels: a tile of scores beside what a row has seen before.

    weigh(scores, visible, row_max, scale_log2, SOFTCAP) -> weights of the tile, decay of what came before, new row_max
    with_sinks(total, row_max, sinks, heads, owned)      -> the sum of a row's weights, its sink's among them

Maxima are in log2 units of the scaled scores, and rows start at -inf. Rules of scores that a layer has not are None and
constexpr 0: no instruction is left of them. online_softmax_gluon.py is the same for the kernels for Hopper.

On a block's walk, where each layer reads it on a GPU: decode.py and prefill.py weigh every tile by it. It does not know
where keys lie and who sees them: the kernels do.
"""

import math

import triton
import triton.language as tl

LOG2_E = math.log2(math.e)
_LOG2_E = tl.constexpr(LOG2_E)


@triton.jit
def _tanh(scores, scale_log2, SOFTCAP: tl.constexpr):
    """tanh(scaled score / softcap) as 1 - 2 / (1 + e^2x), of -inf and inf too. Near 0 it is exact to an eps of 1, which
    is an eps of the softcap in a score. The factor stays for the caller's FMA: multiplied here, a compiler would fuse
    it into the exponent of tiles without a mask alone, and a chunk's bits would not be those of its prompt."""
    doubled = tl.exp2(scores * (scale_log2 * (2.0 / SOFTCAP)))
    return 1.0 - 2.0 / (1.0 + doubled)


@triton.jit
def weigh(scores, visible, row_max, scale_log2, SOFTCAP: tl.constexpr):
    """`visible`: of keys, for each row; None: all are."""
    if SOFTCAP > 0:
        scores = _tanh(scores, scale_log2, SOFTCAP)
        scale_log2 = SOFTCAP * _LOG2_E
    if visible is not None:
        # This also wipes the scores of unused slots, so that keys need no mask of their own.
        scores = tl.where(visible, scores, float("-inf"))
    # The scale sits inside the exponent, one FMA: scaling a bf16 query beforehand would round it.
    new_max = tl.maximum(row_max, tl.max(scores, axis=1) * scale_log2)
    # A row that has seen no key yet has maximum -inf, and -inf - -inf is NaN.
    shift = tl.where(new_max == float("-inf"), 0.0, new_max)
    weights = tl.exp2(scores * scale_log2 - shift[:, None])
    decay = tl.exp2(row_max - shift)
    return weights, decay, new_max


@triton.jit
def with_sinks(total, row_max, sinks, heads, owned):
    """`sinks`: [Hq] in the units of scaled scores, or None. In one operation each, so that no compiler may fuse them
    differently in another kernel. Of a row without keys the total is the weight of the sink: its result stays 0."""
    if sinks is not None:
        sink = tl.load(sinks + heads, mask=owned, other=0.0).to(tl.float32)
        shift = tl.where(row_max == float("-inf"), 0.0, row_max)
        total += tl.exp2(tl.fma(sink, tl.full(sink.shape, _LOG2_E, tl.float32), -shift))
    return total
