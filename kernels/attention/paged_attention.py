"""Causal attention of a ragged batch over a paged KV cache: contract, reference and kernel selection.

Decode and prefill sequences may be mixed. The last query row of a sequence is at position seq_len - 1; a row sees the
keys at its own position and before. A row without keys (padding with seq_len 0) gives 0; rows that belong to no
sequence are undefined. Unused slots, block 0, table entries after the used part and blocks outside all windows have no
effect, even if they contain NaN. Source: PagedAttention, https://arxiv.org/abs/2309.06180.
"""
# Numerics: softmax in float32; products accumulate in float32, those of float32 are three tf32 products (error about
# 1e-6). A chunk's result does not depend on how its prompt was cut. On a Hopper GPU without `one_kernel`, the rest of
# the batch (and above 8 and 48 rows its padding) decides where the keys of a decoding sequence are cut, and so its last
# bits; with an e4m3 cache it also decides which of two kernels computes a prompt (widened.py).
# Launch grids depend only on shapes and the two bounds, so a plan and its layers can be captured in a CUDA graph. Loose
# bounds cost only the memory of the plan.
# Nine arguments: a structure would be a type that kernels and engine share.

from collections.abc import Iterable
from functools import partial

import torch
import triton
from torch import Tensor

from kernels.attention.decode import attend_decode, num_multiprocessors
from kernels.attention.decode_hopper import attend_decode_hopper
from kernels.attention.decode_plan import DecodePlan, plan_decode
from kernels.attention.decode_shares import SharePlan, plan_shares, share_config
from kernels.attention.invariant import attend_invariant
from kernels.attention.joined_rows import JoinedRows, join_rows, most_queries
from kernels.attention.pool_rows import supports_tma
from kernels.attention.prefill import attend_prefill
from kernels.attention.prefill_hopper import attend_prefill_hopper
from kernels.attention.reference import PagedKV, attend_sequence
from kernels.attention.score_rules import NO_RULES, ScoreRules
from kernels.attention.widened import WidenedBlocks
from kernels.fp8_kv import E4M3, UNIT_SCALES, KVScales


def paged_attention_reference(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    max_query_len: int,
    max_seq_len: int,
    scale: float,
    kv_scales: KVScales = UNIT_SCALES,
    rules: ScoreRules = NO_RULES,
) -> Tensor:
    """Compute paged_attention() with plain torch operators, one sequence at a time."""
    output = torch.zeros(query.shape, dtype=query.dtype, device=query.device)
    kv, starts = PagedKV(key_cache, value_cache, kv_scales), query_start_loc.tolist()
    for sequence, seq_len in enumerate(seq_lens.tolist()):
        rows = slice(starts[sequence], starts[sequence + 1])
        if seq_len > 0 and rows.stop > rows.start:
            output[rows] = attend_sequence(query[rows], kv, block_tables[sequence], seq_len, scale, rules)
    return output


class AttentionPlan:
    """The part of attention that the layers of a step share. On a CPU the reference serves and nothing is prepared."""

    def __init__(
        self,
        block_tables: Tensor,
        query_start_loc: Tensor,
        seq_lens: Tensor,
        max_query_len: int,
        max_seq_len: int,
        num_heads: int,
        key_cache: Tensor,
        one_kernel: bool = False,
        windows: Iterable[int] = (0,),
        max_joined: int = 1,
    ) -> None:
        """Plan one step; see paged_attention() for the tensors.

        Args:
            block_tables: [S, B], int32.
            query_start_loc: [S + 1], int32.
            seq_lens: [S], int32, in tokens.
            max_query_len: Upper bound of new tokens per sequence.
            max_seq_len: Upper bound of seq_lens.
            num_heads: Query heads.
            key_cache: The keys of any layer.
            one_kernel: Batch-invariant bits: decoded or in a prompt, a token's result is the same in every batch.
                Slower
                for long prompts.
            windows: The distinct windows of the layers' rules; each has its own plan.
            max_joined: Read the keys of so many rows of one token once, if they continue each other in the same blocks.
        """
        self._batch = (block_tables, query_start_loc, seq_lens, max_query_len, max_seq_len)
        self._triton: dict[int, TritonPlan] = {}  # by window
        if seq_lens.is_cuda:
            plan = partial(TritonPlan, *self._batch, num_heads, key_cache, one_kernel, max_joined=max_joined)
            self._triton = {window: plan(window=window) for window in windows}

    def attend(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        scale: float,
        kv_scales: KVScales = UNIT_SCALES,
        rules: ScoreRules = NO_RULES,
    ) -> Tensor:
        """Attend in one layer and return [T, Hq, D].

        On CUDA, a kernel launched without dependence must run between the plan and its first layer. In a decode-only
        batch the same holds between the writes of older keys and the first layer.

        Raises:
            KeyError: If the plan was made without the window of `rules`.
        """
        if not query.is_cuda:
            return paged_attention_reference(query, key_cache, value_cache, *self._batch, scale, kv_scales, rules)
        plan = self._triton[rules.window]
        return plan.attend(query, key_cache, value_cache, scale, True, kv_scales, rules)


Tensors = tuple[Tensor, Tensor, Tensor, Tensor]  # query, key_cache, value_cache, block_tables


class TritonPlan:
    def __init__(
        self,
        block_tables: Tensor,
        query_start_loc: Tensor,
        seq_lens: Tensor,
        max_query_len: int,
        max_seq_len: int,
        num_heads: int,
        key_cache: Tensor,
        one_kernel: bool = False,
        window: int = 0,
        max_joined: int = 1,
    ) -> None:
        """Plan one window; `window` is that of the rules passed to attend()."""
        assert block_tables.dtype == query_start_loc.dtype == seq_lens.dtype == torch.int32
        assert query_start_loc.is_contiguous() and seq_lens.is_contiguous() and block_tables.stride(1) == 1
        self._block_tables, self._lengths = block_tables, (query_start_loc, seq_lens)
        num_kv_heads, block_size, head_dim = key_cache.shape[1:]
        self._on_hopper = supports_tma(key_cache, num_heads)
        max_queries = most_queries(max_joined, num_heads // num_kv_heads, one_kernel)
        self._joined = JoinedRows(query_start_loc, 1)
        if max_queries > 1 and len(seq_lens) > 1:
            self._joined = join_rows(*self._lengths, block_tables, block_size, max_queries)
        self._max_query_len, self._max_seq_len, self._one_kernel = max_query_len, max_seq_len, one_kernel
        self._window, self._max_joined = window, max_joined
        self._decode: DecodePlan | SharePlan | None = None
        self._widened: WidenedBlocks | None = None
        widens = self._on_hopper and key_cache.dtype == E4M3 and max_query_len > 1 and not one_kernel
        if widens and WidenedBlocks.suit(len(seq_lens), max_seq_len):
            self._widened = WidenedBlocks(block_tables, *self._lengths, max_seq_len, key_cache.shape[2], window)
        # A single sequence with several new tokens leaves nothing to decode.
        if not one_kernel and (max_query_len == 1 or seq_lens.shape[0] > 1):
            if self._on_hopper:
                num_rows = triton.cdiv(len(seq_lens), self._joined.max_queries)
                config = share_config(num_rows, is_fp8=key_cache.dtype == E4M3)
                processors = num_multiprocessors(seq_lens.device)
                heads = num_heads, num_kv_heads, head_dim
                self._decode = plan_shares(*self._lengths, *heads, config, processors, window, self._joined)
            else:
                self._decode = plan_decode(*self._lengths, max_seq_len, num_heads, head_dim, window, self._joined)

    def attend(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        scale: float,
        may_start_early: bool,
        kv_scales: KVScales = UNIT_SCALES,
        rules: ScoreRules = NO_RULES,
    ) -> Tensor:
        assert rules.window == self._window and (rules.sinks is None or rules.sinks.is_contiguous())
        is_fp8 = key_cache.dtype == E4M3
        assert query.stride(2) == key_cache.stride(3) == 1 and query.shape[1] % key_cache.shape[1] == 0
        assert key_cache.stride() == value_cache.stride() and key_cache.dtype == value_cache.dtype
        assert is_fp8 or (query.dtype == key_cache.dtype and kv_scales == UNIT_SCALES)
        assert key_cache.untyped_storage().data_ptr() == value_cache.untyped_storage().data_ptr()
        assert key_cache.stride(0) < 2**31
        output = query.new_empty(query.shape)
        scale, value_scale = scale * kv_scales.key, kv_scales.value if is_fp8 else None
        tensors = (query, key_cache, value_cache, self._block_tables)
        if self._one_kernel:
            bounds = self._max_query_len, self._max_seq_len
            attend_invariant(*tensors, *self._lengths, output, *bounds, scale, value_scale, rules, self._joined)
        else:
            self._decode_rows(tensors, output, scale, value_scale, may_start_early, rules)
            self._prefill_rows(tensors, output, scale, value_scale, rules)
        return output

    def _decode_rows(
        self,
        tensors: Tensors,
        output: Tensor,
        scale: float,
        value_scale: float | None,
        may_start_early: bool,
        rules: ScoreRules,
    ) -> None:
        if isinstance(self._decode, SharePlan):
            starts = may_start_early, self._max_joined if self._max_query_len == 1 else 0
            attend_decode_hopper(*tensors, self._decode, output, scale, *starts, value_scale, rules)
        elif self._decode is not None:
            attend_decode(*tensors, self._decode, output, scale, may_start_early, value_scale, rules)

    def _prefill_rows(
        self, tensors: Tensors, output: Tensor, scale: float, value_scale: float | None, rules: ScoreRules
    ) -> None:
        if self._max_query_len > 1 and self._on_hopper and value_scale is None:
            attend_prefill_hopper(*tensors, *self._lengths, output, scale, None, rules)
        elif self._widened is not None:
            query, key_cache, value_cache, _ = tensors
            widened = (*self._widened.caches(key_cache, value_cache), self._widened.block_tables)
            attend_prefill_hopper(query, *widened, *self._lengths, output, scale, value_scale, rules)
        elif self._max_query_len > 1:
            attend_prefill(*tensors, *self._lengths, output, self._max_query_len, scale, value_scale, rules)


def paged_attention_triton(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    max_query_len: int,
    max_seq_len: int,
    scale: float,
    one_kernel: bool = False,
    kv_scales: KVScales = UNIT_SCALES,
    rules: ScoreRules = NO_RULES,
    max_joined: int = 1,
) -> Tensor:
    """Compute paged_attention(); `max_joined` as in AttentionPlan."""
    batch = (block_tables, query_start_loc, seq_lens, max_query_len, max_seq_len)
    plan = TritonPlan(*batch, query.shape[1], key_cache, one_kernel, rules.window, max_joined)
    # The plan is written by the kernel directly before, so the first layer may not start early.
    return plan.attend(query, key_cache, value_cache, scale, False, kv_scales, rules)


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    max_query_len: int,
    max_seq_len: int,
    scale: float,
    one_kernel: bool = False,
    kv_scales: KVScales = UNIT_SCALES,
    rules: ScoreRules = NO_RULES,
) -> Tensor:
    """Compute causal attention over a paged KV cache.

    Args:
        query: [T, Hq, D], new tokens of all sequences, concatenated; D is contiguous.
        key_cache: [N, Hkv, BS, D], dtype of query or e4m3; D is contiguous, Hq = G * Hkv, fewer than 2**31 elements
            between blocks.
        value_cache: [N, Hkv, BS, D], a view of the same pool with the same strides.
        block_tables: [S, B], int32, block ids; only the first ceil(seq_len / BS) of a row are read.
        query_start_loc: [S + 1], int32; sequence s owns the query rows from entry s up to entry s + 1.
        seq_lens: [S], int32, in tokens, including the new tokens, which are already stored.
        max_query_len: Upper bound of new tokens per sequence, known to the host: a launch never waits for the device.
        max_seq_len: Upper bound of seq_lens, known to the host.
        scale: Factor of the scores.
        one_kernel: Use the batch-invariant kernel (invariant.py).
        kv_scales: Scales of an e4m3 cache; 1 for any other.
        rules: Window, softcap and sinks.

    Returns:
        [T, Hq, D], contiguous, dtype of query.
    """
    batch = (block_tables, query_start_loc, seq_lens, max_query_len, max_seq_len, scale)
    if query.is_cuda:
        return paged_attention_triton(query, key_cache, value_cache, *batch, one_kernel, kv_scales, rules)
    return paged_attention_reference(query, key_cache, value_cache, *batch, kv_scales, rules)
