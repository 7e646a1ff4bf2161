"""Unpack 4-bit integers in registers, as the left operand of a matrix product (weights.py has the arrangement)."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.w4a16.weights import Offset

NONE = gl.constexpr(int(Offset.NONE))
ZERO_POINT = gl.constexpr(int(Offset.ZERO_POINT))
MINIMUM = gl.constexpr(int(Offset.MINIMUM))
# A bfloat16 with the exponent of 128 has an integer in its lowest bits: four bits and 0x4300 are 128 + value.
_UNPACK_WORD = """
    lop3.b32 t, {w}, 0x000F000F, magic, 0xEA;
    sub.bf16x2 {o0}, t, {upper};
    shr.b32 u, {w}, 4;
    lop3.b32 t, u, 0x000F000F, magic, 0xEA;
    sub.bf16x2 {o1}, t, {lower};
    shr.b32 u, {w}, 8;
    lop3.b32 t, u, 0x000F000F, magic, 0xEA;
    sub.bf16x2 {o2}, t, {upper};
    shr.b32 u, {w}, 12;
    lop3.b32 t, u, 0x000F000F, magic, 0xEA;
    sub.bf16x2 {o3}, t, {lower};
"""
_SCALE_WORD = """
    mul.bf16x2 {o0}, {o0}, by_upper;
    mul.bf16x2 {o1}, {o1}, by_lower;
    mul.bf16x2 {o2}, {o2}, by_upper;
    mul.bf16x2 {o3}, {o3}, by_lower;
"""
_ADD_WORD = """
    fma.rn.bf16x2 {o0}, {o0}, by_upper, add_upper;
    fma.rn.bf16x2 {o1}, {o1}, by_lower, add_lower;
    fma.rn.bf16x2 {o2}, {o2}, by_upper, add_upper;
    fma.rn.bf16x2 {o3}, {o3}, by_lower, add_lower;
"""
_START = """
    { .reg .b32 t, u, magic, upper, lower, by_upper, by_lower, add_upper, add_lower; mov.b32 magic, 0x43004300;
"""
_MIDDLE = "mov.b32 upper, 0x43084308; mov.b32 lower, 0x43084308;"
_FIRST = "mov.b32 upper, magic; mov.b32 lower, magic;"
_OUTPUTS = "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r"


def _both_words(text: str) -> str:
    return "".join(
        text.format(w=f"${8 + word}", upper="upper", lower="lower", **{f"o{i}": f"${4 * word + i}" for i in range(4)})
        for word in range(2)
    )


def _of_pair(upper: str, lower: str, register: int) -> str:
    """Return instructions that put both halves of a register, of the rows r and r + 8, into registers of their own."""
    return f"prmt.b32 {upper}, ${register}, ${register}, 0x1010; prmt.b32 {lower}, ${register}, ${register}, 0x3232;"


def _middle_of(widen: str) -> str:
    """Return instructions that make two middles; `widen` makes float32 {wide} of the 16 bits {narrow}."""
    halves = "".join(
        widen.format(wide=wide, narrow=narrow) for wide, narrow in (("sl", "a"), ("sh", "b"), ("ml", "c"), ("mh", "d"))
    )
    return (
        "{ .reg .b16 a, b, c, d; .reg .f32 sl, sh, ml, mh; mov.b32 {a, b}, $1; mov.b32 {c, d}, $2;" + halves +
        "fma.rn.f32 ml, sl, 0f41000000, ml; fma.rn.f32 mh, sh, 0f41000000, mh; cvt.rn.bf16x2.f32 $0, mh, ml; }"
    )  # fmt: skip


_MIDDLE_OF_FLOAT16 = gl.constexpr(_middle_of("cvt.f32.f16 {wide}, {narrow};"))
_MIDDLE_OF_BFLOAT16 = gl.constexpr(_middle_of("cvt.f32.bf16 {wide}, {narrow};"))
_INTEGERS = _both_words(_UNPACK_WORD)
_SCALED = _INTEGERS + _both_words(_SCALE_WORD)
_ADDED = _INTEGERS + _both_words(_ADD_WORD)
_OF_ZEROS, _OF_SCALES = _of_pair("upper", "lower", 10), _of_pair("by_upper", "by_lower", 12)
# By (offset, is scaled). Registers 10 and 11 have the zero points, or what value 8 stands for; the scales follow.
_UNPACK = gl.constexpr({
    (Offset.NONE, False): _START + _MIDDLE + _INTEGERS + "}",
    (Offset.ZERO_POINT, False): _START + _OF_ZEROS + _INTEGERS + "}",
    (Offset.MINIMUM, False): _START + _FIRST + _INTEGERS + "}",
    (Offset.NONE, True): _START + _MIDDLE + _of_pair("by_upper", "by_lower", 10) + _SCALED + "}",
    (Offset.ZERO_POINT, True): _START + _OF_ZEROS + _OF_SCALES + _SCALED + "}",
    (Offset.MINIMUM, True): _START + _MIDDLE + _of_pair("add_upper", "add_lower", 10) + _OF_SCALES + _ADDED + "}",
})  # fmt: skip
_OPERANDS = gl.constexpr([_OUTPUTS + ",r" * num for num in (2, 4, 6)])


@gluon.constexpr_function
def layout_of_words(row_warps, steps, num_warps):
    """Return the layout of [row / 16, lane / 4, lane % 4, step]."""
    rows = [[1 << bit, 0, 0, 0] for bit in range(row_warps.bit_length() - 1)]
    in_warps = num_warps.bit_length() - 1
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 0, 1], [0, 0, 0, 2]][: steps // 2] + rows[in_warps:],
        lane_bases=[[0, 0, 1, 0], [0, 0, 2, 0], [0, 1, 0, 0], [0, 2, 0, 0], [0, 4, 0, 0]],
        warp_bases=rows[:in_warps],
        block_bases=[],
        shape=[row_warps, 8, 4, steps],
    )


@gluon.constexpr_function
def _layout_of_scales(row_warps, num_warps):
    """Return the layout of [row / 16, lane / 4, lower] that agrees with that of sums."""
    rows = [[1 << bit, 0, 0] for bit in range(row_warps.bit_length() - 1)]
    in_warps = num_warps.bit_length() - 1
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 1], *rows[in_warps:]],
        lane_bases=[[0, 0, 0], [0, 0, 0], [0, 1, 0], [0, 2, 0], [0, 4, 0]],
        warp_bases=rows[:in_warps],
        block_bases=[],
        shape=[row_warps, 8, 2],
    )


@gluon.constexpr_function
def _reads_offsets(offset, is_scaled):
    return offset == ZERO_POINT or (offset == MINIMUM and is_scaled)


@gluon.jit
def unpacked_words(values, offsets, scales, OFFSET: gl.constexpr, IS_SCALED: gl.constexpr):
    """Return bfloat16 values [..., half of a pair of steps, lower, right, step] of words [..., step].

    `offsets` and `scales` are unused without them, or have the shape of the words.
    """
    types: gl.constexpr = (gl.bfloat16,) * 8
    asm: gl.constexpr = _UNPACK[OFFSET, IS_SCALED]
    READS_OFFSETS: gl.constexpr = _reads_offsets(OFFSET, IS_SCALED)
    operands: gl.constexpr = _OPERANDS[READS_OFFSETS + IS_SCALED]
    if READS_OFFSETS and IS_SCALED:
        parts = gl.inline_asm_elementwise(asm, operands, [values, offsets, scales], dtype=types, is_pure=True, pack=2)
    elif READS_OFFSETS:
        parts = gl.inline_asm_elementwise(asm, operands, [values, offsets], dtype=types, is_pure=True, pack=2)
    elif IS_SCALED:
        parts = gl.inline_asm_elementwise(asm, operands, [values, scales], dtype=types, is_pure=True, pack=2)
    else:
        parts = gl.inline_asm_elementwise(asm, operands, [values], dtype=types, is_pure=True, pack=2)
    first = gl.join(gl.join(parts[0], parts[1]), gl.join(parts[2], parts[3]))
    second = gl.join(gl.join(parts[4], parts[5]), gl.join(parts[6], parts[7]))
    return gl.join(first, second)


@gluon.jit
def unpacked(values, offsets, scales, operand: gl.constexpr, OFFSET: gl.constexpr, IS_SCALED: gl.constexpr):
    """Return a tile [16 * warps, 16 * steps] as bfloat16 in the registers of wgmma's left operand."""
    if _reads_offsets(OFFSET, IS_SCALED):
        offsets = gl.expand_dims(gl.expand_dims(offsets, 2), 3) + gl.zeros_like(values)
    if IS_SCALED:
        scales = gl.expand_dims(gl.expand_dims(scales, 2), 3) + gl.zeros_like(values)
    WARPS: gl.constexpr = values.shape[0]
    STEPS: gl.constexpr = values.shape[3]
    # warp, lane / 4, lane % 4, pair of steps, half, lower, right, step
    joined = gl.reshape(
        unpacked_words(values, offsets, scales, OFFSET, IS_SCALED), [WARPS, 8, 4, STEPS // 2, 2, 2, 2, 2]
    )
    tile = gl.reshape(gl.permute(joined, [0, 5, 1, 3, 7, 6, 2, 4]), [WARPS * 16, STEPS * 16])
    return gl.convert_layout(tile, operand, assert_trivial=True)


@gluon.jit
def scales_of(words, of_rows: gl.constexpr, SCALE_TYPE: gl.constexpr, num_warps: gl.constexpr):
    """Return float32 scales [rows] from 16-bit ones [row / 16, lane / 4, lower] in shared memory."""
    scales = gl.permute(words.load(_layout_of_scales(words.shape[0], num_warps)), [0, 2, 1])
    scales = gl.convert_layout(gl.reshape(scales, [16 * words.shape[0]]), of_rows, assert_trivial=True)
    return scales.to(SCALE_TYPE, bitcast=True).to(gl.float32)


@gluon.jit
def _in_bfloat16(pairs, SCALE_TYPE: gl.constexpr):
    """Return words of two bfloat16 from words of two scales."""
    if gl.float16 == SCALE_TYPE:
        return gl.inline_asm_elementwise(
            "{ .reg .b16 a, b; .reg .f32 c, d; mov.b32 {a, b}, $1; cvt.f32.f16 c, a; cvt.f32.f16 d, b;"
            " cvt.rn.bf16x2.f32 $0, d, c; }",
            "=r,r", [pairs], dtype=gl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    return pairs


@gluon.jit
def _middles(scales, minima, SCALE_TYPE: gl.constexpr):
    """Return words of two bfloat16, 8 * scale + minimum, which is nearer to 0 than the minimum: less is rounded."""
    asm: gl.constexpr = _MIDDLE_OF_FLOAT16 if gl.float16 == SCALE_TYPE else _MIDDLE_OF_BFLOAT16
    return gl.inline_asm_elementwise(asm, "=r,r,r", [scales, minima], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def load_part(
    tiles, tile_pairs, place, group, words: gl.constexpr,
    OFFSET: gl.constexpr, IS_SCALED: gl.constexpr, SCALE_TYPE: gl.constexpr,
):  # fmt: skip
    """Return the words of values, offsets and scales; unused ones are the values."""
    PARTS: gl.constexpr = 1 if OFFSET == NONE else 2
    of_pairs: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(3, words))
    values = tiles.index(place).load(words)
    offsets, scales = values, values
    if OFFSET == ZERO_POINT:
        offsets = tile_pairs.index(group * PARTS + 1).load(of_pairs)
    if IS_SCALED:
        scales = _in_bfloat16(tile_pairs.index(group * PARTS).load(of_pairs), SCALE_TYPE)
        if OFFSET == MINIMUM:
            minima = tile_pairs.index(group * PARTS + 1).load(of_pairs)
            offsets = _middles(tile_pairs.index(group * PARTS).load(of_pairs), minima, SCALE_TYPE)
    return values, offsets, scales
