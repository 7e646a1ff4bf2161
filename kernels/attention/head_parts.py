"""The parts of a head in the decode kernel for Hopper: one, or two of a cache in e4m3, its even and its odd elements.

    load_query, operands    left and right operands of products, a part each
    zeros                   the accumulators that they are summed in
    normalised, store_parts a part's result; all parts to where the head is

A cache in e4m3 is walked as 16-bit pairs of neighbours, so that its way to the registers is that of any other cache:
TMA, ring, swizzle, ldmatrix. Only there a pair becomes two float16. On a block's walk, where decode_hopper.py reads it.
It knows no softmax and no ring.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def _lanes(part: gl.constexpr, HEAD_DIM: gl.constexpr, PARTS: gl.constexpr, layout: gl.constexpr):
    """The elements of a head that are in a part of it."""
    lanes = gl.arange(0, HEAD_DIM // PARTS, layout)
    return lanes * 2 + part if PARTS == 2 else lanes


@gluon.jit
def query_operand(query_tile, dtype: gl.constexpr):
    """As operands.query_operand(), for keys that are multiplied in `dtype`."""
    if dtype == gl.float16 and query_tile.dtype == gl.bfloat16:
        query_tile = query_tile.to(gl.float32)
        query_tile = gl.where(query_tile > 65504.0, 65504.0, query_tile)
        query_tile = gl.where(query_tile < -65504.0, -65504.0, query_tile).to(gl.float16)
    return query_tile


@gluon.jit
def _query_part(
    query, place, part: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, PARTS: gl.constexpr,
    mma: gl.constexpr,
):  # fmt: skip
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    group = gl.arange(0, 16, gl.SliceLayout(1, left))
    lanes = _lanes(part, HEAD_DIM, PARTS, gl.SliceLayout(0, left))
    row, token_stride, kv_head, head_stride = place
    read = row.to(gl.int64) * token_stride + ((kv_head * GROUP + group) * head_stride)[:, None] + lanes[None, :]
    owned = (group < GROUP)[:, None] & (lanes < HEAD_DIM)[None, :]
    loaded = gl.load(query + read, mask=owned, other=0.0)
    return query_operand(loaded, gl.float16) if PARTS == 2 else loaded


@gluon.jit
def load_query(query, place, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, PARTS: gl.constexpr, mma: gl.constexpr):
    """The parts of a group's queries, as left operands of products.

    `place`: (row, elements from row to row, kv head, elements from head to head).
    """
    even = _query_part(query, place, 0, GROUP, HEAD_DIM, PARTS, mma)
    return (even, _query_part(query, place, 1, GROUP, HEAD_DIM, PARTS, mma)) if PARTS == 2 else (even,)


@gluon.jit
def _unpacked(pairs):
    """(even, odd) elements in float16 of int16 pairs of e4m3, exactly."""
    return gl.inline_asm_elementwise(
        """
        {
            .reg .b32 sorted;
            .reg .b16 even, odd;
            prmt.b32 sorted, $2, 0, 0x3120;
            mov.b32 {even, odd}, sorted;
            cvt.rn.f16x2.e4m3x2 $0, even;
            cvt.rn.f16x2.e4m3x2 $1, odd;
        }
        """,
        constraints="=r,=r,r",
        args=[pairs],
        dtype=(gl.float16, gl.float16),
        is_pure=True,
        pack=2,
    )


@gluon.jit
def operands(tile, layout: gl.constexpr, PARTS: gl.constexpr):
    """The parts of a tile in shared memory, as right operands of products."""
    stored = tile.load(layout)
    return _unpacked(stored) if PARTS == 2 else (stored,)


@gluon.jit
def zeros(WIDTH: gl.constexpr, PARTS: gl.constexpr, mma: gl.constexpr):
    """The accumulators of a row's parts."""
    even = gl.zeros([16, WIDTH], gl.float32, mma)
    return (even, gl.zeros([16, WIDTH], gl.float32, mma)) if PARTS == 2 else (even,)


@gluon.jit
def normalised(accumulator, row_sum, value_scale):
    attended = accumulator / row_sum[:, None]
    if value_scale is not None:
        attended *= value_scale
    return attended


@gluon.jit
def store_parts(
    attended, target, start, group, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, PARTS: gl.constexpr,
    mma: gl.constexpr,
):  # fmt: skip
    """The rows of a group, each from its `start` of `target` on; None: `target` is a pointer for each row."""
    for part in gl.static_range(PARTS):
        lanes = _lanes(part, HEAD_DIM, PARTS, gl.SliceLayout(0, mma))
        owned = (group < GROUP)[:, None] & (lanes < HEAD_DIM)[None, :]
        write = lanes[None, :] if start is None else start + lanes[None, :]
        gl.store(target + write, attended[part].to(target.dtype.element_ty), mask=owned)
