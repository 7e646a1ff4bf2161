"""The end of a product with a 4-bit weight: biases and gates of its sums [outputs, rows of x]."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.moe.activation import apply_gate


@gluon.jit
def with_bias(total, bias, tile, num_outputs, GATED: gl.constexpr):
    """Return the sums of a tile plus their biases, of which gated ones are stored as all gates, then all ups."""
    row = tile * total.shape[0] + gl.arange(0, total.shape[0], gl.SliceLayout(1, total.type.layout))
    if GATED:
        row = row // 16 * 8 + row % 8 + row % 16 // 8 * num_outputs
    return total + gl.load(bias + row).to(gl.float32)[:, None]


@gluon.jit
def gated(both, dtype: gl.constexpr, IS_GELU: gl.constexpr):
    """Return the gated [M / 2, columns] of [M, columns] with eight rows of gate before eight of up."""
    HALF: gl.constexpr = both.shape[0] // 2
    COLUMNS: gl.constexpr = both.shape[1]
    parts = gl.permute(gl.reshape(both.to(dtype), [HALF // 8, 2, 8, COLUMNS]), [0, 2, 3, 1])
    gate, up = gl.split(parts)
    return gl.reshape(apply_gate(gate.to(gl.float32), up.to(gl.float32), IS_GELU, 1.0, 0.0, 0.0), [HALF, COLUMNS])
