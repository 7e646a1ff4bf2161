"""Online softmax for the Triton attention kernels: one tile of scores combined with what a row has seen before.

Maxima are in log2 units of the scaled scores; rows start at -inf. Rules that a layer does not have are None or
constexpr 0 and cost no instruction. online_softmax_gluon.py has the same functions in Gluon.
Source: Milakov and Gimelshein, https://arxiv.org/abs/1805.02867.
"""

import math

import triton
import triton.language as tl

LOG2_E = math.log2(math.e)
_LOG2_E = tl.constexpr(LOG2_E)


@triton.jit
def _tanh(scores, scale_log2, SOFTCAP: tl.constexpr):
    """Return tanh(scaled score / softcap) as 1 - 2 / (1 + e^2x), which is correct for -inf and inf.

    Near 0 the error is one eps of 1, that is, one eps of the softcap in a score. The softcap factor stays for the
    caller's FMA: multiplied here, a compiler would fuse it into the exponent only in tiles without a mask, and a
    chunk's bits would differ from those of its whole prompt.
    """
    doubled = tl.exp2(scores * (scale_log2 * (2.0 / SOFTCAP)))
    return 1.0 - 2.0 / (1.0 + doubled)


@triton.jit
def weigh(scores, visible, row_max, scale_log2, SOFTCAP: tl.constexpr):
    """Weigh one tile of scores.

    Args:
        scores: [M, N], float32, unscaled.
        visible: Mask of the keys per row; None: all are visible.
        row_max: [M], running maximum.
        scale_log2: Factor of the scores times log2(e).
        SOFTCAP: Softcap of the scaled scores; 0: none.

    Returns:
        (weights [M, N], decay [M] of the earlier sums, new row_max [M]).
    """
    if SOFTCAP > 0:
        scores = _tanh(scores, scale_log2, SOFTCAP)
        scale_log2 = SOFTCAP * _LOG2_E
    if visible is not None:
        # This also removes scores of unused slots, so keys need no mask of their own.
        scores = tl.where(visible, scores, float("-inf"))
    # The scale is inside the exponent, as one FMA: scaling a bf16 query beforehand would round it.
    new_max = tl.maximum(row_max, tl.max(scores, axis=1) * scale_log2)
    # A row without keys so far has maximum -inf, and -inf - -inf is NaN.
    shift = tl.where(new_max == float("-inf"), 0.0, new_max)
    weights = tl.exp2(scores * scale_log2 - shift[:, None])
    decay = tl.exp2(row_max - shift)
    return weights, decay, new_max


@triton.jit
def with_sinks(total, row_max, sinks, heads, owned):
    """Add the sink's weight to the sum of each row.

    Each step is one operation, so no compiler can fuse them differently in another kernel. For a row without keys the
    total is the sink's weight; its result stays 0.

    Args:
        total: [M], sums of the weights.
        row_max: [M], running maximum.
        sinks: [Hq], in units of scaled scores, or None.
        heads: Head of each row.
        owned: Mask of the rows in use.
    """
    if sinks is not None:
        sink = tl.load(sinks + heads, mask=owned, other=0.0).to(tl.float32)
        shift = tl.where(row_max == float("-inf"), 0.0, row_max)
        total += tl.exp2(tl.fma(sink, tl.full(sink.shape, _LOG2_E, tl.float32), -shift))
    return total
