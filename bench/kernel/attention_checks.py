"""Check paged attention on a CUDA device: every path against its float64 reference, and bit equality.

A case takes a generator and returns errors; gpu_check.py runs the cases.
"""

import itertools
from dataclasses import replace
from functools import partial
from unittest import mock

import torch
from torch import Tensor

from bench.kernel.cases import (
    HEAD_SHAPES,
    AttentionBatch,
    Check,
    Error,
    HeadShape,
    attention_batch,
    attention_tolerance,
    exact_attention,
    measure_error,
    poisoned,
    same_bits,
    with_drafts,
    with_rules,
)
from kernels.attention import paged_attention as serving
from kernels.attention.paged_attention import AttentionPlan, paged_attention, paged_attention_triton
from kernels.attention.prefill import LARGE_TILES, SHORT_TILES, SMALL_TILES, SplitPrefill, launch_prefill
from kernels.attention.score_rules import NO_RULES, ScoreRules
from kernels.fp8_kv import KVScales

# (cached, new) tokens: decode and prefill, no keys, ends of blocks and tiles, many splits.
MIXED = [(513, 1), (0, 0), (1024, 511), (63, 1), (0, 33), (2047, 1), (5, 2), (4000, 1)]


def attend(batch: AttentionBatch) -> Tensor:
    return poisoned(lambda: paged_attention(**vars(batch)))


def check_attention(
    shape: str,
    block_size: int,
    lengths: list[tuple[int, int]],
    dtype: torch.dtype,
    fp8_scales: KVScales | None = None,
) -> Check:
    """Check one batch; with `fp8_scales`, here and below, the cache is e4m3 with these scales."""

    def check(generator: torch.Generator) -> list[Error]:
        batch = attention_batch(HEAD_SHAPES[shape], block_size, lengths, dtype, generator, fp8_scales)
        output = attend(batch)
        errors = [measure_error(output, exact_attention(batch), attention_tolerance(dtype))]
        # A second run must give the same bits, or there is a race.
        return [*errors, same_bits(attend(batch), output)]

    return check


def attend_invariantly(batch: AttentionBatch) -> Tensor:
    return poisoned(lambda: paged_attention_triton(**vars(batch), one_kernel=True))


def check_invariance(shape: str, dtype: torch.dtype, fp8_scales: KVScales | None = None) -> Check:
    """Check the batch-invariant kernel.

    A sequence must have the same bits alone and in a mixed batch, and a token the same decoded and prefilled.
    """

    def check(generator: torch.Generator) -> list[Error]:
        lengths = [*MIXED, (0, 1200)]
        batch = attention_batch(HEAD_SHAPES[shape], 16, lengths, dtype, generator, fp8_scales)
        together, starts = attend_invariantly(batch), batch.query_start_loc.tolist()
        errors = [measure_error(together, exact_attention(batch), attention_tolerance(dtype))]
        for sequence, (cached, new) in enumerate(lengths):
            rows = slice(starts[sequence], starts[sequence + 1])
            errors.append(same_bits(attend_invariantly(part_of(batch, sequence, 0, new, cached)), together[rows]))
        for token in (0, 1, 511, 512, 700, 1199):
            decoded = attend_invariantly(part_of(batch, len(lengths) - 1, token, token + 1, 0))
            errors.append(same_bits(decoded, together[starts[-2] + token][None]))
        return errors

    return check


def part_of(batch: AttentionBatch, sequence: int, first: int, end: int, cached: int) -> AttentionBatch:
    """Return new tokens [first, end) of one sequence, alone."""
    start, device = int(batch.query_start_loc[sequence]), batch.query.device
    return replace(
        batch,
        query=batch.query[start + first : start + end],
        block_tables=batch.block_tables[sequence : sequence + 1],
        query_start_loc=torch.tensor([0, end - first], dtype=torch.int32, device=device),
        seq_lens=torch.tensor([cached + end], dtype=torch.int32, device=device),
        max_query_len=end - first,
        max_seq_len=cached + end,
    )


def check_chunks(shape: str, dtype: torch.dtype, fp8_scales: KVScales | None = None) -> Check:
    """Check that chunks (none of one token, which would use the decode kernel) have the bits of the whole prompt."""

    def check(generator: torch.Generator) -> list[Error]:
        whole = attention_batch(HEAD_SHAPES[shape], 16, [(0, 700)], dtype, generator, fp8_scales)
        expected, cuts = attend(whole), (0, 33, 35, 300, 698, 700)
        pieces = [part_of(whole, 0, start, end, 0) for start, end in itertools.pairwise(cuts)]
        return [same_bits(torch.cat([attend(piece) for piece in pieces]), expected)]

    return check


def check_captured(shape: str, dtype: torch.dtype, fp8_scales: KVScales | None = None) -> Check:
    """Check that a captured decode has the bits of a launch with exact bounds.

    It is captured with bounds far above its batch and padded with rows without keys, then replayed on other lengths.
    """

    def check(generator: torch.Generator) -> list[Error]:
        lengths = [(37 * i, 1) for i in range(1, 30)]
        batch = attention_batch(HEAD_SHAPES[shape], 16, lengths, dtype, generator, fp8_scales)
        sequences, padded = len(lengths), 32
        query = torch.nn.functional.pad(batch.query, (0, 0, 0, 0, 0, padded - sequences))
        tables = torch.nn.functional.pad(batch.block_tables, (0, 8192 - batch.block_tables.shape[1], 0, 3))
        seq_lens = torch.nn.functional.pad(batch.seq_lens, (0, 3))
        starts = torch.arange(padded + 1, dtype=torch.int32, device=generator.device)
        results = torch.empty_like(query, memory_format=torch.contiguous_format)

        def attend_layers() -> None:
            plan = AttentionPlan(tables, starts, seq_lens, 1, 131072, query.shape[1], batch.key_cache)
            results.fill_(torch.nan)  # a kernel that waits for the plan, as in every step before the first layer
            for _ in range(3):
                results.copy_(plan.attend(query, batch.key_cache, batch.value_cache, batch.scale, batch.kv_scales))

        attend_layers()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            attend_layers()
        errors = []
        for lens in (batch.seq_lens, (batch.seq_lens // 3).clamp(min=1)):
            seq_lens[:sequences] = lens
            graph.replay()
            expected = paged_attention(**vars(replace(batch, seq_lens=lens)))
            errors += [same_bits(results[:sequences], expected), same_bits(results[sequences:], 0 * query[sequences:])]
        return errors

    return check


def check_drafts(
    heads: HeadShape, dtype: torch.dtype, rules: ScoreRules = NO_RULES, fp8_scales: KVScales | None = None
) -> Check:
    """Check rows that are read together because they continue each other.

    In the batch-invariant kernel this changes no bit.
    """
    # (keys of the last token, drafts): before, at and after the ends of blocks, tiles, splits and shares.
    ends = [(4000, 3), (33, 3), (513, 1), (1, 0), (4, 3), (2048, 2), (129, 3), (16, 7), (700, 0), (8191, 3)]

    def check(generator: torch.Generator) -> list[Error]:
        lengths = [(keys - 1, 1) for keys, _ in ends]
        batch = attention_batch(heads, 16, lengths, dtype, generator, fp8_scales)
        drafted = with_drafts(with_rules(batch, rules), [number for _, number in ends], generator)
        exact, errors = exact_attention(drafted), []
        for one_kernel in (False, True):
            attend = partial(paged_attention_triton, **vars(drafted), one_kernel=one_kernel)
            outputs = [poisoned(partial(attend, max_joined=number)) for number in (4, 4, 8)]
            with mock.patch.object(serving, "supports_tma", lambda *_: False):
                outputs.append(poisoned(partial(attend, max_joined=4)))
            errors += [measure_error(output, exact, attention_tolerance(dtype)) for output in outputs]
            errors.append(same_bits(outputs[0], outputs[1]))
        return [*errors, same_bits(outputs[0], poisoned(attend))]

    return check


def check_tilings(shape: str, dtype: torch.dtype) -> Check:
    """Check that small and large prefill tiles have the same bits, because other sequences may decide between them."""

    def check(generator: torch.Generator) -> list[Error]:
        batch = attention_batch(HEAD_SHAPES[shape], 16, [(300, 500), (0, 700)], dtype, generator)
        outputs = []
        for tiles in (SHORT_TILES, SMALL_TILES, LARGE_TILES):
            output = torch.empty_like(batch.query, memory_format=torch.contiguous_format)
            caches = (batch.key_cache, batch.value_cache, batch.block_tables)
            lengths = (batch.query_start_loc, batch.seq_lens)
            launch_prefill(batch.query, *caches, *lengths, output, batch.scale, tiles, SplitPrefill(min_query_len=2))
            outputs.append(output)
        return [same_bits(output, outputs[0]) for output in outputs[1:]]

    return check


def check_for_every_device(shape: str, dtype: torch.dtype, fp8_scales: KVScales | None = None) -> Check:
    """Check the kernels that serve devices other than Hopper."""
    check = check_attention(shape, 16, MIXED, dtype, fp8_scales)

    def check_elsewhere(generator: torch.Generator) -> list[Error]:
        with mock.patch.object(serving, "supports_tma", lambda *_: False):
            return check(generator)

    return check_elsewhere
