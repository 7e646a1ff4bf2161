"""Parts of a head in the Hopper decode kernel: one part, or the even and the odd elements of an e4m3 cache.

An e4m3 cache is read as 16-bit pairs of adjacent elements, so it takes the same path as any other cache (TMA, ring,
swizzle, ldmatrix). A pair becomes two float16 elements only in registers.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def _lanes(part: gl.constexpr, HEAD_DIM: gl.constexpr, PARTS: gl.constexpr, layout: gl.constexpr):
    """Return the indices of a head's elements in one part."""
    lanes = gl.arange(0, HEAD_DIM // PARTS, layout)
    return lanes * 2 + part if PARTS == 2 else lanes


@gluon.jit
def query_operand(query_tile, dtype: gl.constexpr):
    """Convert queries as operands.query_operand() does, for keys multiplied in `dtype`."""
    if dtype == gl.float16 and query_tile.dtype == gl.bfloat16:
        query_tile = query_tile.to(gl.float32)
        query_tile = gl.where(query_tile > 65504.0, 65504.0, query_tile)
        query_tile = gl.where(query_tile < -65504.0, -65504.0, query_tile).to(gl.float16)
    return query_tile


@gluon.jit
def query_and_head(rows, GROUP: gl.constexpr, MAX_QUERIES: gl.constexpr):
    """Return the query and the head of the rows of a tile."""
    return (rows // GROUP, rows % GROUP) if MAX_QUERIES > 1 else (0, rows)


@gluon.jit
def _query_part(
    query, place, queries, part: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, PARTS: gl.constexpr,
    MAX_QUERIES: gl.constexpr, mma: gl.constexpr,
):  # fmt: skip
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    rows = gl.arange(0, 16, gl.SliceLayout(1, left))
    number, head = query_and_head(rows, GROUP, MAX_QUERIES)
    lanes = _lanes(part, HEAD_DIM, PARTS, gl.SliceLayout(0, left))
    row, token_stride, kv_head, head_stride = place
    read = row.to(gl.int64) * token_stride + ((kv_head * GROUP + head) * head_stride)[:, None] + lanes[None, :]
    if MAX_QUERIES > 1:
        read += (number * token_stride)[:, None]
    owned = (rows < GROUP * queries)[:, None] & (lanes < HEAD_DIM)[None, :]
    loaded = gl.load(query + read, mask=owned, other=0.0)
    return query_operand(loaded, gl.float16) if PARTS == 2 else loaded


@gluon.jit
def load_query(
    query, place, queries,
    GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, PARTS: gl.constexpr, MAX_QUERIES: gl.constexpr, mma: gl.constexpr,
):  # fmt: skip
    """Load the heads of a group for `queries` tokens as left operands, one per part.

    `place` is (first row, elements between rows, KV head, elements between heads).
    """
    even = _query_part(query, place, queries, 0, GROUP, HEAD_DIM, PARTS, MAX_QUERIES, mma)
    odd = _query_part(query, place, queries, 1, GROUP, HEAD_DIM, PARTS, MAX_QUERIES, mma) if PARTS == 2 else even
    return (even, odd) if PARTS == 2 else (even,)


@gluon.jit
def _unpacked(pairs):
    """Convert int16 pairs of e4m3 to (even, odd) float16 elements, exactly."""
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
    """Load a tile from shared memory as right operands, one per part."""
    stored = tile.load(layout)
    return _unpacked(stored) if PARTS == 2 else (stored,)


@gluon.jit
def zeros(WIDTH: gl.constexpr, PARTS: gl.constexpr, mma: gl.constexpr):
    """Return the zeroed accumulators of a row's parts."""
    even = gl.zeros([16, WIDTH], gl.float32, mma)
    return (even, gl.zeros([16, WIDTH], gl.float32, mma)) if PARTS == 2 else (even,)


@gluon.jit
def normalized(accumulator, row_sum, value_scale):
    attended = accumulator / row_sum[:, None]
    if value_scale is not None:
        attended *= value_scale
    return attended


@gluon.jit
def store_parts(
    attended, target, start, is_row, HEAD_DIM: gl.constexpr, PARTS: gl.constexpr, mma: gl.constexpr,
):  # fmt: skip
    """Store a group's rows from `start` of `target` on; with `start` None, `target` has one pointer per row."""
    for part in gl.static_range(PARTS):
        lanes = _lanes(part, HEAD_DIM, PARTS, gl.SliceLayout(0, mma))
        owned = is_row[:, None] & (lanes < HEAD_DIM)[None, :]
        write = lanes[None, :] if start is None else start + lanes[None, :]
        gl.store(target + write, attended[part].to(target.dtype.element_ty), mask=owned)
