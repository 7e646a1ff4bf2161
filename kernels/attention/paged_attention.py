"""Causal attention of a ragged batch over a paged KV cache; decode and prefill sequences mixed freely.

    AttentionPlan(block_tables, query_start_loc, seq_lens, max_query_len, max_seq_len, num_heads, key_cache, windows)
        once a step, with any layer's keys: what all layers share.
        plan.attend(query, key_cache, value_cache, scale, kv_scales, rules) -> output, once a layer

    paged_attention(query, key_cache, value_cache, block_tables, query_start_loc, seq_lens, max_query_len,
                    max_seq_len, scale, one_kernel, kv_scales, rules) -> output [T, Hq, D], contiguous
        query                    [T, Hq, D]         new tokens of all sequences, concatenated; D is contiguous
        key_cache, value_cache   [N, Hkv, BS, D]    views of one pool with equal strides, below 2^31 elements each;
                                                    D is contiguous; Hq = G * Hkv; of the query's type, or e4m3
        block_tables             [S, B]     int32   block ids; only the first ceil(seq_len / BS) of a row are read
        query_start_loc          [S + 1]    int32   sequence s owns the query rows from entry s up to entry s + 1
        seq_lens                 [S]        int32   tokens of a sequence, the new ones (already stored) included
        max_query_len, max_seq_len          int     upper bounds known to the host: launching never waits for the device
        kv_scales                                   of a cache in e4m3 (kernels/fp8_kv.py), 1 for any other
        rules                                       window, softcap and sinks (score_rules.py)

The last query row of a sequence is at position seq_len - 1; a row sees the keys at its own position and before. A row
that sees no key (seq_len 0, the padding of a batch) gives 0; rows that no sequence owns are left undefined. Whatever
lies in unused slots, in block 0, behind a table's used part, or in blocks that no new token's window reaches, NaN
included, has no effect. Softmax in float32;
products accumulate in float32, those of float32 are three tf32 products each (error about 1e-6). A chunk's result does
not depend on how its prompt was cut. What else is in a batch, and past 8 and 48 rows its padding, decides where keys of
a decoding sequence are cut, and so its last bits, on a Hopper GPU; nowhere else, and not with `one_kernel`. Of a
cache in e4m3 it also decides which of two kernels computes a prompt there (widened.py).

Launch grids depend on shapes and on the two bounds alone, so a plan and its layers can be captured in a CUDA graph;
loose bounds cost nothing but the room of the plan.

Does not know layers, and does not write the cache (rotary_embedding.py does, before).
"""
# The operation has nine arguments; a structure would be a type that kernels and engine must share.
# ruff: noqa: PLR0913, PLR0917

from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor

from kernels.attention.decode import attend_decode, num_multiprocessors
from kernels.attention.decode_hopper import attend_decode_hopper
from kernels.attention.decode_plan import DecodePlan, plan_decode
from kernels.attention.decode_shares import SharePlan, plan_shares, share_config
from kernels.attention.invariant import attend_invariant
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
    output = torch.zeros(query.shape, dtype=query.dtype, device=query.device)
    kv, starts = PagedKV(key_cache, value_cache, kv_scales), query_start_loc.tolist()
    for sequence, seq_len in enumerate(seq_lens.tolist()):
        rows = slice(starts[sequence], starts[sequence + 1])
        if seq_len > 0 and rows.stop > rows.start:
            output[rows] = attend_sequence(query[rows], kv, block_tables[sequence], seq_len, scale, rules)
    return output


class AttentionPlan:
    """Shared by the layers of a step. On a CPU the reference serves them, and there is nothing to prepare."""

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
    ) -> None:
        """`one_kernel`: a token has the same bits whether it is decoded or is part of a prompt, whatever else is in the
        batch; slower for long prompts. `windows`: those of the layers' rules, each once; keys are dealt out by them."""
        self._batch = (block_tables, query_start_loc, seq_lens, max_query_len, max_seq_len)
        self._triton: dict[int, TritonPlan] = {}  # by window
        if seq_lens.is_cuda:
            plan = partial(TritonPlan, *self._batch, num_heads, key_cache, one_kernel)
            self._triton = {window: plan(window) for window in windows}

    def attend(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        scale: float,
        kv_scales: KVScales = UNIT_SCALES,
        rules: ScoreRules = NO_RULES,
    ) -> Tensor:
        """[T, Hq, D]. On CUDA a kernel launched without dependence must lie between the plan and its first layer, and
        in a batch that only decodes between its older keys and that layer; KeyError for a window that the plan was
        not told."""
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
    ) -> None:
        """`window`: of the rules that attend() is called with."""
        assert block_tables.dtype == query_start_loc.dtype == seq_lens.dtype == torch.int32
        assert query_start_loc.is_contiguous() and seq_lens.is_contiguous() and block_tables.stride(1) == 1
        self._block_tables, self._lengths = block_tables, (query_start_loc, seq_lens)
        self._max_query_len, self._max_seq_len, self._one_kernel = max_query_len, max_seq_len, one_kernel
        self._window = window
        self._on_hopper = supports_tma(key_cache, num_heads)
        self._decode: DecodePlan | SharePlan | None = None
        self._widened: WidenedBlocks | None = None
        widens = self._on_hopper and key_cache.dtype == E4M3 and max_query_len > 1 and not one_kernel
        if widens and WidenedBlocks.suit(len(seq_lens), max_seq_len):
            self._widened = WidenedBlocks(block_tables, *self._lengths, max_seq_len, key_cache.shape[2], window)
        # One sequence with several new tokens leaves nothing to decode.
        if not one_kernel and (max_query_len == 1 or seq_lens.shape[0] > 1):
            num_kv_heads, _, head_dim = key_cache.shape[1:]
            if self._on_hopper:
                config = share_config(seq_lens.shape[0], is_fp8=key_cache.dtype == E4M3)
                processors = num_multiprocessors(seq_lens.device)
                heads = num_heads, num_kv_heads, head_dim
                self._decode = plan_shares(*self._lengths, *heads, config, processors, window)
            else:
                self._decode = plan_decode(*self._lengths, max_seq_len, num_heads, head_dim, window)

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
            attend_invariant(*tensors, *self._lengths, output, *bounds, scale, value_scale, rules)
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
            starts = may_start_early, self._max_query_len == 1
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
) -> Tensor:
    batch = (block_tables, query_start_loc, seq_lens, max_query_len, max_seq_len)
    plan = TritonPlan(*batch, query.shape[1], key_cache, one_kernel, rules.window)
    # The plan is written by the kernel right before.
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
    batch = (block_tables, query_start_loc, seq_lens, max_query_len, max_seq_len, scale)
    if query.is_cuda:
        return paged_attention_triton(query, key_cache, value_cache, *batch, one_kernel, kv_scales, rules)
    return paged_attention_reference(query, key_cache, value_cache, *batch, kv_scales, rules)
