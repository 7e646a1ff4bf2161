"""Random inputs for the kernels and error measures for their outputs, shared by gpu_check.py and tests/kernels.

Everything that a kernel must not read is NaN: unused slots, block 0, unowned blocks, other layers. Errors are measured
against float64.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kernels.attention.paged_attention import paged_attention_reference
from kernels.attention.score_rules import NO_RULES, ScoreRules
from kernels.fp8_kv import E4M3, UNIT_SCALES, KVScales, to_e4m3


@dataclass(frozen=True)
class HeadShape:
    num_heads: int
    num_kv_heads: int
    head_dim: int


HEAD_SHAPES = {"smollm2-135m": HeadShape(9, 3, 64), "llama-8b": HeadShape(32, 8, 128)}
HIDDEN = {"smollm2-135m": (576, 1536), "llama-8b": (4096, 14336)}


@dataclass(frozen=True)
class AttentionBatch:
    """The arguments of paged_attention by name."""

    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    block_tables: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    max_query_len: int
    max_seq_len: int
    scale: float
    kv_scales: KVScales = UNIT_SCALES
    rules: ScoreRules = NO_RULES


def attention_batch(
    shape: HeadShape,
    block_size: int,
    lengths: list[tuple[int, int]],
    dtype: torch.dtype,
    generator: torch.Generator,
    fp8_scales: KVScales | None = None,
) -> AttentionBatch:
    """Make one sequence per (cached tokens, new tokens), with strided views and blocks in random order.

    With `fp8_scales` the cache is e4m3 with these scales, otherwise it has `dtype`.
    """
    device = generator.device
    random: dict[str, Any] = {"dtype": dtype, "device": device, "generator": generator}
    seq_lens = torch.tensor([cached + new for cached, new in lengths], dtype=torch.int32)
    num_blocks = -(-seq_lens // block_size)
    total = int(num_blocks.sum())
    pool = torch.full(
        (total + 3, 2, 2, shape.num_kv_heads, block_size, shape.head_dim), torch.nan, dtype=dtype, device=device
    )
    ids = 1 + torch.randperm(total + 2, device=device, generator=generator)[:total]
    used_slots = torch.cat([
        (torch.arange(int(blocks) * block_size) < int(seq_len)).view(-1, block_size)
        for blocks, seq_len in zip(num_blocks, seq_lens, strict=True)
    ]).to(device)  # fmt: skip
    for key_or_value in range(2):
        rows = torch.randn(total, shape.num_kv_heads, block_size, shape.head_dim, **random)
        pool[ids, 1, key_or_value] = rows.masked_fill_(~used_slots[:, None, :, None], torch.nan)
    pool = pool if fp8_scales is None else _in_e4m3(pool, fp8_scales)
    # One column more than the longest sequence needs; unused entries point to a block of NaN.
    tables = torch.zeros(len(lengths), int(num_blocks.max()) + 1, dtype=torch.int32, device=device)
    for row, sequence_ids in enumerate(ids.split(num_blocks.tolist())):
        tables[row, : len(sequence_ids)] = sequence_ids
    new = torch.tensor([new for _, new in lengths])
    num_tokens = int(new.sum())
    qkv = torch.randn(num_tokens, shape.num_heads + 2 * shape.num_kv_heads, shape.head_dim, **random)
    return AttentionBatch(
        query=qkv[:, : shape.num_heads],
        key_cache=pool[:, 1, 0],
        value_cache=pool[:, 1, 1],
        block_tables=tables,
        query_start_loc=torch.nn.functional.pad(new.cumsum(0), (1, 0)).to(device, torch.int32),
        seq_lens=seq_lens.to(device),
        max_query_len=int(new.max()),
        max_seq_len=int(seq_lens.max()),
        scale=shape.head_dim**-0.5,
        kv_scales=fp8_scales or UNIT_SCALES,
    )


def with_rules(batch: AttentionBatch, rules: ScoreRules) -> AttentionBatch:
    """Return the batch with these rules; of its sinks, each head of the batch has one."""
    sinks = None if rules.sinks is None else rules.sinks[: batch.query.shape[1]].to(batch.query.device)
    return replace(batch, rules=replace(rules, sinks=sinks))


def with_drafts(batch: AttentionBatch, num_drafts: list[int], generator: torch.Generator) -> AttentionBatch:
    """Give the token of each sequence so many rows before it, which see fewer keys, as a token and its drafts do."""
    device = batch.query.device
    rows = torch.repeat_interleave(torch.arange(len(num_drafts)), torch.tensor(num_drafts) + 1).to(device)
    before = torch.cat([torch.arange(number, -1, -1) for number in num_drafts]).to(device)
    shape = len(rows), *batch.query.shape[1:]
    return replace(
        batch,
        query=torch.randn(shape, dtype=batch.query.dtype, device=device, generator=generator),
        block_tables=batch.block_tables[rows].contiguous(),
        query_start_loc=torch.arange(len(rows) + 1, dtype=torch.int32, device=device),
        seq_lens=(batch.seq_lens[rows] - before).int(),
    )


def _in_e4m3(pool: Tensor, scales: KVScales) -> Tensor:
    stored = torch.empty_like(pool, dtype=E4M3)
    for key_or_value, scale in enumerate((scales.key, scales.value)):
        stored[:, :, key_or_value] = to_e4m3(pool[:, :, key_or_value], scale)
    return stored


def exact_attention(batch: AttentionBatch, chunk_tokens: int = 512) -> Tensor:
    """Compute the reference in float64; long prompts are cut into chunks to bound the memory."""
    starts, ends, lens, rows = [0], batch.query_start_loc.tolist(), [], []
    for sequence, seq_len in enumerate(batch.seq_lens.tolist()):
        start, end = ends[sequence], ends[sequence + 1]
        for chunk_end in [*range(start + chunk_tokens, end, chunk_tokens), end]:
            starts.append(chunk_end)
            lens.append(seq_len - (end - chunk_end))
            rows.append(sequence)
    return paged_attention_reference(
        batch.query.double(), batch.key_cache, batch.value_cache, batch.block_tables[rows],
        torch.tensor(starts), torch.tensor(lens), batch.max_query_len, batch.max_seq_len, batch.scale,
        batch.kv_scales, batch.rules,
    )  # fmt: skip


@dataclass(frozen=True)
class Error:
    """Errors of one output.

    Attributes:
        norm_ratio: |out - exact| / |exact|.
        worst_ratio: Largest |out - exact| / (|exact| + rms of the row) of an element.
        tolerance: Limit of norm_ratio.
    """

    norm_ratio: float
    worst_ratio: float
    tolerance: float

    @property
    def passed(self) -> bool:
        # NaN compares false. A single element may have four times the tolerance, because a value near zero carries the
        # rounding
        # of its row's larger terms.
        return self.norm_ratio <= self.tolerance and self.worst_ratio <= 4 * self.tolerance


def measure_error(output: Tensor, exact: Tensor, tolerance: float) -> Error:
    difference = output.double() - exact
    row_rms = exact.square().mean(dim=-1, keepdim=True).sqrt()
    # A row of zeros must match exactly, so any difference there counts as infinite.
    scale = exact.abs() + row_rms
    worst = torch.where(difference == 0, 0.0, difference.abs() / scale).max()
    norm = difference.norm() / exact.norm() if exact.norm() > 0 else difference.norm()
    return Error(float(norm), float(worst), tolerance)


def rounding_tolerance(dtype: torch.dtype) -> float:
    """Return the tolerance of one rounding: half a unit in the last place, at most eps / 2 of the value.

    float32 results also carry float32 arithmetic: exp, rsqrt and sums of thousands of terms add a few eps.
    """
    return 16 * torch.finfo(dtype).eps if dtype == torch.float32 else 0.5 * torch.finfo(dtype).eps


def attention_tolerance(dtype: torch.dtype) -> float:
    """Return the tolerance of attention: weights and output are rounded to the dtype, eps / 2 each.

    float32 uses three tf32 products on tensor cores, about 1e-6 of a score, which changes exponentials a few times
    that.
    """
    return 2e-5 if dtype == torch.float32 else torch.finfo(dtype).eps


Check = Callable[[torch.Generator], list[Error]]


def same_bits(output: Tensor, expected: Tensor) -> Error:
    return Error(0.0, 0.0, 0.0) if torch.equal(output, expected) else Error(float("inf"), float("inf"), 0.0)


def poisoned(call: Callable[[], Any]) -> Any:
    """Call with uninitialized memory filled with NaN, so that unwritten elements are detected."""
    torch.use_deterministic_algorithms(True)
    try:
        return call()
    finally:
        torch.use_deterministic_algorithms(False)
