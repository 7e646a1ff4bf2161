"""C++ kernels of a step against torch's operators; a row's bits do not depend on its batch.

The AVX-512 kernels run on any machine that has SIMDe.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.attention.paged_attention import paged_attention_reference
from kernels.attention.score_rules import NO_RULES, ScoreRules
from kernels.cpu.library import CpuLibrary
from kernels.cpu.step import DTYPES, StepKernels, served_instruction_sets
from kernels.fp8_kv import E4M3, UNIT_SCALES, KVScales, to_e4m3

FLOATS = sorted(DTYPES, key=DTYPES.__getitem__)
# For results of up to 4: float32 sums in another order; bfloat16 rounds the result once.
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2.0**-7}


def kernels_of(library: CpuLibrary, head_dim: int, dtype: torch.dtype, kv_dtype: torch.dtype) -> list[StepKernels]:
    """Return one instance for each instruction set of this processor."""
    sets = served_instruction_sets(library, head_dim)
    return [StepKernels(library, head_dim, dtype, kv_dtype, instruction_set) for instruction_set in sets]


@dataclass(frozen=True, kw_only=True)
class Shape:
    num_kv_heads: int = 3
    group: int = 3
    head_dim: int = 64
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    kv_dtype: torch.dtype = torch.float32

    @property
    def num_heads(self) -> int:
        return self.num_kv_heads * self.group


class Batch:
    """Sequences of (new tokens, total tokens), a pool of two layers with their keys, and a step's inputs."""

    def __init__(self, shape: Shape, lengths: list[tuple[int, int]]) -> None:
        generator = torch.Generator().manual_seed(len(lengths))
        most = max(-(-length // shape.block_size) for _, length in lengths)
        self.shape, self.lengths = shape, lengths
        size = (1 + most * len(lengths), 2, 2, shape.num_kv_heads, shape.block_size, shape.head_dim)
        self.pool = torch.randn(size, generator=generator).to(shape.kv_dtype)
        self.tables = (torch.randperm(size[0] - 1, generator=generator) + 1).view(len(lengths), most).int()
        new = torch.tensor([count for count, _ in lengths])
        self.starts = torch.cat((torch.zeros(1, dtype=torch.int64), new.cumsum(0))).int()
        self.seq_lens = torch.tensor([length for _, length in lengths], dtype=torch.int32)
        self.positions = torch.cat([torch.arange(length - count, length) for count, length in lengths])
        owners = torch.arange(len(lengths)).repeat_interleave(new)
        blocks = self.tables[owners, self.positions // shape.block_size].long()
        self.slots = blocks * shape.block_size + self.positions % shape.block_size
        width = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
        self.qkv = torch.randn(len(owners), width, generator=generator).to(shape.dtype)

    def begin(self, kernels: StepKernels) -> Any:
        return kernels.begin(
            self.pool, self.shape.num_heads, self.tables, self.starts, self.seq_lens, self.positions, self.slots
        )

    def attend(
        self,
        kernels: StepKernels,
        rules: ScoreRules = NO_RULES,
        rows: Tensor | None = None,
        scales: KVScales = UNIT_SCALES,
    ) -> Tensor:
        scale = self.shape.head_dim**-0.5
        layer = self.pool[:, 1, 0]
        return kernels.attend(self.begin(kernels), self.qkv, layer, scale, rows, rules, scales)

    def expected(self, rules: ScoreRules, scales: KVScales) -> Tensor:
        shape = self.shape
        query = self.qkv[:, : shape.num_heads * shape.head_dim].float().unflatten(1, (shape.num_heads, -1))
        longest = max(count for count, _ in self.lengths), int(self.seq_lens.max())
        keys, values = self.pool[:, 1, 0].float() * scales.key, self.pool[:, 1, 1].float() * scales.value
        scale = shape.head_dim**-0.5
        return paged_attention_reference(
            query, keys, values, self.tables, self.starts, self.seq_lens, *longest, scale, rules=rules
        ).flatten(1)


def part(batch: Batch, sequence: int, first: int, end: int) -> Batch:
    """Return the tokens `first`..`end` of one sequence of `batch` alone, over the same pool."""
    found = object.__new__(Batch)
    start = int(batch.starts[sequence])
    begun = int(batch.seq_lens[sequence]) - (int(batch.starts[sequence + 1]) - start)
    rows = slice(start + first, start + end)
    found.shape, found.pool, found.lengths = batch.shape, batch.pool, [(end - first, begun + end)]
    found.tables = batch.tables[sequence : sequence + 1]
    found.starts = torch.tensor([0, end - first], dtype=torch.int32)
    found.seq_lens = torch.tensor([begun + end], dtype=torch.int32)
    found.positions, found.slots, found.qkv = batch.positions[rows], batch.slots[rows], batch.qkv[rows]
    return found


@st.composite
def sequences(draw: st.DrawFn) -> list[tuple[int, int]]:
    news = draw(st.lists(st.one_of(st.just(1), st.integers(1, 90)), min_size=1, max_size=5))
    return [(new, new + draw(st.integers(0, 200))) for new in news]


SHAPES = st.builds(
    Shape,
    num_kv_heads=st.integers(1, 3),
    group=st.integers(1, 7),
    head_dim=st.sampled_from((8, 16, 40, 64, 72, 128, 256)),
    block_size=st.sampled_from((1, 8, 16, 64)),
    dtype=st.sampled_from(FLOATS),
    kv_dtype=st.sampled_from((*FLOATS, E4M3)),
)
SCALES = st.sampled_from((UNIT_SCALES, KVScales(0.37, 1.9)))


@settings(max_examples=40, deadline=None)
@given(SHAPES, sequences(), st.sampled_from((0, 1, 5, 64, 100)), st.sampled_from((0.0, 2.0)), st.booleans(), SCALES)
def test_attention_matches_the_reference(
    library: CpuLibrary,
    shape: Shape,
    lengths: list[tuple[int, int]],
    window: int,
    softcap: float,
    has_sinks: bool,
    scales: KVScales,
) -> None:
    sinks = torch.linspace(-2, 3, shape.num_heads) if has_sinks else None
    rules = ScoreRules(window=window, softcap=softcap, sinks=sinks)
    batch = Batch(shape, lengths)
    tolerance = TOLERANCES[shape.dtype]
    expected = batch.expected(rules, scales)
    for kernels in kernels_of(library, shape.head_dim, shape.dtype, shape.kv_dtype):
        attended = batch.attend(kernels, rules, scales=scales)
        torch.testing.assert_close(attended.float(), expected, atol=tolerance, rtol=tolerance)


@settings(max_examples=30, deadline=None)
@given(SHAPES, sequences(), st.sampled_from((0, 50)), st.data())
def test_attention_row_is_the_same_alone_and_in_any_chunk(
    library: CpuLibrary, shape: Shape, lengths: list[tuple[int, int]], window: int, data: st.DataObject
) -> None:
    rules, batch = ScoreRules(window=window), Batch(shape, lengths)
    sequence = data.draw(st.integers(0, len(lengths) - 1))
    num_new = lengths[sequence][0]
    first = data.draw(st.integers(0, num_new - 1))
    end = data.draw(st.integers(first + 1, num_new))
    for kernels in kernels_of(library, shape.head_dim, shape.dtype, shape.kv_dtype):
        together = batch.attend(kernels, rules)
        start = int(batch.starts[sequence])
        assert torch.equal(
            part(batch, sequence, first, end).attend(kernels, rules), together[start + first : start + end]
        )
        rows = torch.arange(len(together) - 1, -1, -3)
        assert torch.equal(batch.attend(kernels, rules, rows), together[rows])


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@settings(max_examples=40, deadline=None)
@given(
    SHAPES,
    st.lists(st.one_of(st.integers(1, 700), st.sampled_from((512, 513, 575, 577))), min_size=1, max_size=3),
    st.sampled_from((0, 1, 100, 600)),
    st.sampled_from((0.0, 2.0)),
    st.booleans(),
)
def test_threads_sharing_a_token_match_one_thread(
    library: CpuLibrary, shape: Shape, lengths: list[int], window: int, softcap: float, has_sinks: bool
) -> None:
    sinks = torch.linspace(-2, 3, shape.num_heads) if has_sinks else None
    rules = ScoreRules(window=window, softcap=softcap, sinks=sinks)
    batch = Batch(shape, [(1, length) for length in lengths])
    for kernels in kernels_of(library, shape.head_dim, shape.dtype, shape.kv_dtype):
        with threads(1):
            assert batch.begin(kernels).scores is None
            wanted = batch.attend(kernels, rules)
        for count in (2, 3):
            with threads(count):
                assert torch.equal(batch.attend(kernels, rules), wanted)


def test_only_few_tokens_of_long_sequences_are_split(library: CpuLibrary) -> None:
    kernels = StepKernels(library, 64, torch.float32, torch.float32)
    with threads(2):
        for lengths, is_shared in (
            ([(1, 512)], True), ([(1, 511)], False), ([(1, 600), (1, 4)], True), ([(2, 600)], False),
            ([(1, 600)] * 3, False),
        ):  # fmt: skip
            assert (Batch(Shape(), lengths).begin(kernels).scores is not None) == is_shared, lengths


def test_keys_past_the_sequence_end_are_not_read(library: CpuLibrary) -> None:
    batch = Batch(Shape(), [(1, 37), (40, 70)])
    for kernels in kernels_of(library, 64, torch.float32, torch.float32):
        expected = batch.attend(kernels)
        for row, length in enumerate(batch.seq_lens.tolist()):
            batch.pool[int(batch.tables[row, length // 16]), :, :, :, length % 16 :] = torch.nan
        assert torch.equal(batch.attend(kernels), expected)


def test_nan_scores_stay_nan(library: CpuLibrary) -> None:
    """The sampler detects a broken sequence by them."""
    batch = Batch(Shape(), [(1, 37), (1, 38)])
    batch.qkv[0, 5] = torch.nan
    for kernels in kernels_of(library, 64, torch.float32, torch.float32):
        attended = batch.attend(kernels)
        assert attended[0, :64].isnan().all()
        assert not attended[1].isnan().any()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("size", [8, 20, 48, 576])
def test_rms_norm_matches_torch_row_by_row(library: CpuLibrary, size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(size)
    x, residual = torch.randn(40, 2, size).to(dtype).unbind(1)
    x, residual, weight = x.contiguous(), residual.contiguous(), torch.rand(size) + 0.5
    tolerance = TOLERANCES[dtype]
    for kernels in kernels_of(library, 64, dtype, dtype):
        total = x.clone()
        normed = kernels.add_rms_norm(total, residual, weight * size**0.5, 1e-5)
        assert torch.equal(total, x + residual)
        expected = torch.nn.functional.rms_norm(total.float(), (size,), weight, 1e-5)
        torch.testing.assert_close(normed.float(), expected, atol=tolerance, rtol=tolerance)
        assert torch.equal(kernels.rms_norm(total, weight * size**0.5, 1e-5), normed)
        alone = kernels.add_rms_norm(x[7:8].clone(), residual[7:8], weight * size**0.5, 1e-5)
        assert torch.equal(alone, normed[7:8])


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("size", [8, 20, 576])
def test_multiply_has_the_bits_of_torch(library: CpuLibrary, size: int, dtype: torch.dtype) -> None:
    x = torch.randn(40, size, generator=torch.Generator().manual_seed(size)).to(dtype)
    for kernels in kernels_of(library, 64, dtype, dtype):
        assert torch.equal(kernels.multiply(x.clone(), 0.22), x * 0.22)


@settings(max_examples=20, deadline=None)
@given(SHAPES, sequences(), st.booleans(), st.booleans())
def test_queries_and_keys_are_rotated_and_stored(
    library: CpuLibrary, shape: Shape, lengths: list[tuple[int, int]], turns: bool, is_scaled: bool
) -> None:
    batch = Batch(shape, lengths)
    angles = torch.arange(300)[:, None] * 100.0 ** -torch.linspace(0, 1, shape.head_dim // 2)
    table = torch.cat((angles.cos(), angles.sin()), dim=1)
    scales = torch.linspace(0.5, 2, len(table)) if is_scaled else None
    heads = batch.qkv.float().unflatten(1, (-1, shape.head_dim))
    expected = heads.clone()
    if turns:
        cos, sin = table[batch.positions][:, None].chunk(2, dim=-1)
        a, b = heads[:, : -shape.num_kv_heads].chunk(2, dim=-1)
        expected[:, : -shape.num_kv_heads] = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    if turns and scales is not None:
        expected[:, : shape.num_heads] *= scales[batch.positions, None, None]
    tolerance = TOLERANCES[shape.dtype]
    for kernels in kernels_of(library, shape.head_dim, shape.dtype, shape.kv_dtype):
        wide, before = batch.qkv.repeat(1, 2), batch.pool.clone()
        qkv, beside = wide.chunk(2, dim=1)  # rows that are apart
        turning = table if turns else None
        kernels.rotate_and_store(batch.begin(kernels), qkv, turning, batch.pool[:, 1, 0], query_scales=scales)
        turned = qkv.unflatten(1, (-1, shape.head_dim))
        torch.testing.assert_close(turned.float(), expected, atol=tolerance, rtol=tolerance)
        assert torch.equal(beside, batch.qkv)
        keys, values = turned[:, shape.num_heads :].to(shape.kv_dtype).chunk(2, dim=1)
        blocks, offsets = batch.slots // shape.block_size, batch.slots % shape.block_size
        before[blocks, 1, 0, :, offsets], before[blocks, 1, 1, :, offsets] = keys, values
        assert torch.equal(batch.pool.view(torch.uint8), before.view(torch.uint8))


@pytest.mark.parametrize("dtype", FLOATS)
def test_e4m3_values_are_stored_and_read_as_in_torch(library: CpuLibrary, dtype: torch.dtype) -> None:
    """All bfloat16 values, including ties and NaN, and the adjacent float32 values, as keys of one head."""
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    every = torch.cat([(every.float().view(torch.int32) + beside).view(torch.float32) for beside in (-1, 0, 1)])
    shape = Shape(num_kv_heads=1, group=1, dtype=dtype, kv_dtype=E4M3)
    batch = Batch(shape, [(len(every) // 64, len(every) // 64)])
    scales = KVScales(0.37, 1.9)
    for kernels in kernels_of(library, 64, dtype, E4M3):
        batch.qkv[:, 64:] = every.view(-1, 64).repeat(1, 2).to(dtype)
        kernels.rotate_and_store(batch.begin(kernels), batch.qkv, None, batch.pool[:, 1, 0], scales)
        blocks, offsets = batch.slots // shape.block_size, batch.slots % shape.block_size
        for part, scale in enumerate((scales.key, scales.value)):
            stored = batch.pool.view(torch.uint8)[blocks, 1, part, 0, offsets]
            wanted = to_e4m3(batch.qkv[:, 64 * (1 + part) : 64 * (2 + part)], scale)
            same = stored.view(E4M3).float(), wanted.float()
            assert torch.equal(same[0].nan_to_num(500), same[1].nan_to_num(500))


def test_every_e4m3_value_is_read(library: CpuLibrary) -> None:
    """A sequence of one token reads its own value."""
    every = torch.arange(256, dtype=torch.uint8).view(4, 64)
    batch = Batch(Shape(num_kv_heads=1, group=1, kv_dtype=E4M3), [(1, 1)] * 4)
    batch.pool.view(torch.uint8)[batch.tables[:, 0].long(), 1, 1, 0, 0] = every
    for kernels in kernels_of(library, 64, torch.float32, E4M3):
        wanted = every.view(E4M3).float().nan_to_num(500)
        assert torch.equal(batch.attend(kernels).nan_to_num(500), wanted)


@pytest.mark.parametrize(
    ("head_dim", "dtype", "message"), [(20, torch.float32, "multiple of 8"), (64, torch.float16, "float16")]
)
def test_unsupported_shapes_are_reported(library: CpuLibrary, head_dim: int, dtype: torch.dtype, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StepKernels(library, head_dim, dtype, torch.float32)
