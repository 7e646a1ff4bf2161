"""online_softmax.py in Gluon, for the Hopper kernels."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.attention.online_softmax import LOG2_E

_LOG2_E = gl.constexpr(LOG2_E)


@gluon.jit
def _tanh(scores, scale_log2, SOFTCAP: gl.constexpr):
    doubled = gl.exp2(scores * (scale_log2 * (2.0 / SOFTCAP)))
    return 1.0 - 2.0 / (1.0 + doubled)


@gluon.jit
def weigh(scores, visible, row_max, scale_log2, SOFTCAP: gl.constexpr, HAS_KEYS: gl.constexpr):
    """Weigh one tile. HAS_KEYS: each row sees a key of the tile, so no maximum is -inf."""
    if SOFTCAP > 0:
        scores = _tanh(scores, scale_log2, SOFTCAP)
        scale_log2 = SOFTCAP * _LOG2_E
    if visible is not None:
        # This also removes scores of unused slots, so keys need no mask of their own.
        scores = gl.where(visible, scores, float("-inf"))
    # The scale is inside the exponent, as one FMA: scaling a bf16 query beforehand would round it.
    new_max = gl.maximum(row_max, gl.max(scores, axis=1) * scale_log2)
    shift = new_max
    if not HAS_KEYS:
        # A row without keys so far has maximum -inf, and -inf - -inf is NaN.
        shift = gl.where(new_max == float("-inf"), 0.0, new_max)
    weights = gl.exp2(scores * scale_log2 - shift[:, None])
    decay = gl.exp2(row_max - shift)
    return weights, decay, new_max


@gluon.jit
def with_sinks(total, row_max, sinks, heads, owned):
    if sinks is not None:
        sink = gl.load(sinks + heads, mask=owned, other=0.0).to(gl.float32)
        shift = gl.where(row_max == float("-inf"), 0.0, row_max)
        total += gl.exp2(sink * _LOG2_E - shift)
    return total
