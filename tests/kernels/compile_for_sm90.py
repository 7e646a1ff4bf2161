"""Compile every kernel for an H200 (sm_90) on a machine without a GPU and print ptxas's figures as JSON.

Run in its own process, without TRITON_INTERPRET: `python tests/kernels/compile_for_sm90.py PART PARTS`. The real
launchers run on tensors without memory, so arguments, their alignment and the configuration are those of serving; only
the launch is skipped. The last line has the hashes of all files that were read (ingredients). The figures are checked
in test_compile_sm90.py.
"""

import contextlib
import io
import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from bench.kernel.expert_layers import GPT_OSS, QWEN3, QWEN3_INT4, QWEN35_MOE, ExpertModel
from bench.kernel.linear_shapes import MODELS, linear_shapes_of
from kernels.all_reduce import MAX_BLOCKS, MEMORY_BYTES, Exchange, all_reduce_two
from kernels.attention.decode import attend_decode
from kernels.attention.decode_plan import plan_decode
from kernels.attention.joined_rows import JoinedRows, most_queries
from kernels.attention.paged_attention import TritonPlan
from kernels.attention.prefill import attend_prefill
from kernels.attention.score_rules import NO_RULES, ScoreRules
from kernels.draft_inputs_reference import DraftPlaces, LastDrafts, SampledStep
from kernels.draft_inputs_triton import begin_drafts_triton, place_drafts_triton
from kernels.fp8_kv import E4M3
from kernels.fp8_linear import fp8_linear, gated_fp8_linear
from kernels.fp8_quantize import quantize_groups, quantize_rows
from kernels.fp8_tiles import fp8_tiles
from kernels.kv_block_copy import copy_kv_blocks_triton
from kernels.moe.activation import num_halves
from kernels.moe.experts import apply_experts_triton
from kernels.moe.gather import gather_rows
from kernels.moe.list_product import list_product, list_tiles_of, reads_tokens
from kernels.moe.mxfp4 import Mxfp4Experts
from kernels.moe.route import route_triton
from kernels.moe.shared_gate_triton import add_gated_triton
from kernels.moe.weights import ExpertProduct, Int4Experts
from kernels.ngram_drafts_reference import NgramLengths, TokenTable
from kernels.ngram_drafts_triton import ngram_drafts_triton, record_tokens_triton
from kernels.recurrent.batch import DraftedStates, PendingInputs, RecurrentBatch, StateHeads, StateRates
from kernels.recurrent.triton_kernels import TritonRecurrent
from kernels.rms_norm import add_rms_norm_quantized, add_rms_norm_triton, rms_norm_triton
from kernels.rotary_embedding import RotaryInput, rotate_and_store_triton
from kernels.sampling.cuda import sample_tokens_triton
from kernels.sampling.log_normalizers_triton import log_normalizers_triton
from kernels.sampling.reference import SamplingRows
from kernels.sampling.token_counts import counts_width
from kernels.sampling.token_counts_triton import apply_penalties_triton, count_drawn_triton, recount_triton
from kernels.scaled import Scaled, Scaling
from kernels.short_conv_triton import ConvolvedTokens, short_conv_triton
from kernels.silu_and_mul import gelu_tanh_and_mul_triton, silu_and_mul_quantized, silu_and_mul_triton
from kernels.skinny_linear import gated_skinny_linear, skinny_linear
from kernels.skinny_linear_tiles import tiles_of
from kernels.sum_norm import RowExchange, max_rows, memory_elements, sum_add_rms_norm, sum_add_rms_norm_quantized
from kernels.token_bitmask_triton import apply_token_bitmask_triton
from kernels.unpack_inputs import DescribedBatch, InputTensors, unpack_inputs_triton
from kernels.w4a16.dequantize import dequantize
from kernels.w4a16.few_rows import w4_linear
from kernels.w4a16.one_row import w4_one_row
from kernels.w4a16.weights import Offset, W4Weight
from tests.kernels.ingredients import ingredients, sources_read

Compiled = tuple[CompiledKernel, str]  # and the log of ptxas

TARGET = GPUTarget("cuda", 90, 32)
# A window of one tile, so that every loop has masks; and a wider one with all other rules.
WINDOWED = ScoreRules(128, sinks=torch.empty(64, dtype=torch.bfloat16, device="meta"))
CAPPED = ScoreRules(4096, 50.0)
# name: hidden, query heads, KV heads, head dim, intermediate, layers
SHAPES = {"smollm2-135m": (576, 9, 3, 64, 1536, 30), "llama-8b": (4096, 32, 8, 128, 14336, 32)}
SHAPES["gemma3-4b"] = (2560, 8, 4, 256, 10240, 34)


@contextlib.contextmanager
def compile_only() -> Iterator[list[Compiled]]:
    """Make launches compile for TARGET and append the kernel to the list instead of running it."""
    compiled: list[Compiled] = []
    reports: dict[str, str] = {}  # by kernel: repeated launches are compiled once
    run = JITFunction.run
    knobs.nvidia.dump_ptxas_log = True  # printed to stdout

    def record(self: JITFunction, *args: object, grid: object, warmup: bool, **kwargs: object) -> None:
        with contextlib.redirect_stdout(io.StringIO()) as log:
            kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        compiled.append((kernel, reports.setdefault(kernel.hash, log.getvalue())))

    driver.set_active(
        SimpleNamespace(
            get_current_device=lambda: 0,
            get_current_stream=lambda device: 0,
            get_current_target=lambda: TARGET,
        )
    )
    JITFunction.run = record
    try:
        yield compiled
    finally:
        JITFunction.run = run


def attention(
    shape: str,
    dtype: torch.dtype,
    block_size: int,
    kv_dtype: torch.dtype | None = None,
    rules: ScoreRules = NO_RULES,
    max_joined: int = 1,
) -> Callable[[], object]:
    """Compile the attention kernels; `kv_dtype` is the cache's dtype, None for that of the queries."""
    _, heads, kv_heads, head_dim, _, layers = SHAPES[shape]
    num_tokens, num_sequences = 1024, 64
    pool = torch.empty(4096, layers, 2, kv_heads, block_size, head_dim, dtype=kv_dtype or dtype, device="meta")
    value_scale = 1.0 if kv_dtype == E4M3 else None
    qkv = torch.empty(num_tokens, heads + 2 * kv_heads, head_dim, dtype=dtype, device="meta")
    indices = torch.empty(num_sequences + 1, dtype=torch.int32, device="meta")
    tables = torch.empty(num_sequences, 256, dtype=torch.int32, device="meta")

    key_cache, value_cache = pool[:, 1, 0], pool[:, 1, 1]
    scale = head_dim**-0.5

    def launch() -> None:
        lengths = (indices, indices[1:])
        # Hopper kernels, where supported: a prompt, and enough decoding sequences for shares of their own.
        # With an e4m3 cache a few prompts are widened first.
        few = ((8, 8),) if kv_dtype == E4M3 else ()
        for rows, max_query_len in ((num_sequences, 8), (num_sequences, 1), (48, 1), (8, 1), *few):
            bounds = max_query_len, 4096
            batch = tables, indices[: rows + 1], indices[:rows], *bounds, heads, key_cache
            plan = TritonPlan(*batch, window=rules.window, max_joined=max_joined)
            plan.attend(qkv[:, :heads], key_cache, value_cache, scale, may_start_early=True, rules=rules)
        # Kernels for every device.
        joined = JoinedRows(indices, most_queries(max_joined, heads // kv_heads, one_kernel=False))
        shares = plan_decode(*lengths, 4096, heads, head_dim, rules.window, joined)
        output = torch.empty(num_tokens, heads, head_dim, dtype=dtype, device="meta")
        caches = (key_cache, value_cache, tables)
        attend_decode(qkv[:, :heads], *caches, shares, output, scale, True, value_scale, rules)
        for max_query_len in (8, 100, 512):  # short, small and large tiles
            attend_prefill(qkv[:, :heads], *caches, *lengths, output, max_query_len, scale, value_scale, rules)

    return launch


def attention_in_splits(
    shape: str, kv_dtype: torch.dtype = torch.bfloat16, rules: ScoreRules = NO_RULES, max_joined: int = 1
) -> Callable[[], object]:
    _, heads, kv_heads, head_dim, _, layers = SHAPES[shape]
    pool = torch.empty(4096, layers, 2, kv_heads, 16, head_dim, dtype=kv_dtype, device="meta")
    query = torch.empty(64, heads, head_dim, dtype=torch.bfloat16, device="meta")
    num_rows = 1 if max_joined == 1 else 2
    indices = torch.empty(num_rows + 1, dtype=torch.int32, device="meta")
    tables = torch.empty(num_rows, 256, dtype=torch.int32, device="meta")

    def launch() -> None:
        # Without a GPU there is one multiprocessor; one KV head leaves room for a second program.
        for max_query_len, heads_kept in ((1, 1), (8, kv_heads), (64, kv_heads)):
            caches = (pool[:, 1, 0, :heads_kept], pool[:, 1, 1, :heads_kept])
            batch = tables, indices, indices[1:], max_query_len, 4096, heads, caches[0]
            plan = TritonPlan(*batch, one_kernel=True, window=rules.window, max_joined=max_joined)
            kept = query[:, : heads_kept * heads // kv_heads]
            plan.attend(kept, *caches, head_dim**-0.5, may_start_early=True, rules=rules)

    return launch


def token_kernels(shape: str, dtype: torch.dtype, kv_dtype: torch.dtype | None = None) -> Callable[[], object]:
    hidden, heads, kv_heads, head_dim, intermediate, layers = SHAPES[shape]

    def empty(*size: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device="meta")

    def launch() -> None:
        x, qkv = empty(1024, hidden), empty(1024, heads + 2 * kv_heads, head_dim)
        pool = empty(4096, layers, 2, kv_heads, 16, head_dim, dtype=kv_dtype or dtype)
        slots = empty(1024, dtype=torch.int64)
        rms_norm_triton(x, empty(hidden), 1e-5)
        add_rms_norm_triton(x, x, empty(hidden), 1e-5)
        silu_and_mul_triton(empty(1024, 2 * intermediate))
        gelu_tanh_and_mul_triton(empty(1024, 2 * intermediate))
        table = empty(8192, head_dim, dtype=torch.float32)
        rotate_and_store_triton(RotaryInput(qkv, slots, table, pool[:, 1, 0], pool[:, 1, 1], slots))
        copy_kv_blocks_triton(pool, pool, empty(4, 2, dtype=torch.int64))

    return launch


def recurrent_layers() -> None:
    """Compile a decode and a prompt of 32 value heads of 128 x 128, with a gated shared expert."""
    heads, pools = StateHeads(16, 32, 128, 128), 3
    channels, operators = 2 * heads.key_size + heads.value_size, TritonRecurrent()

    def empty(*size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device="meta")

    exact = partial(empty, dtype=torch.float32)
    sizes = heads.state_size, 7 * channels, 4 * channels, 4 * 2 * heads.num_heads
    delta, inputs, old_qkv, old_gates = exact(4, pools, sum(sizes))[:, 1].split(sizes, dim=1)
    delta = delta.unflatten(1, (heads.num_heads, heads.key_dim, heads.value_dim))
    inputs, old_qkv, old_gates = (
        part.unflatten(1, (rows, -1)) for part, rows in ((inputs, 7), (old_qkv, 4), (old_gates, 4))
    )
    for num_tokens, num_sequences, has_drafts in ((64, 64, False), (64, 64, True), (4096, 2, False)):
        indices = empty(num_sequences + 1, dtype=torch.int32)
        batch = RecurrentBatch(indices, indices[1:], indices[1:], max_query_len=num_tokens // num_sequences)
        if has_drafts:
            batch = replace(batch, max_query_len=4, drafts=DraftedStates(indices[1:], indices[1:]))
        kept = PendingInputs(old_qkv, old_gates) if has_drafts else None
        qkvz = empty(num_tokens, channels + heads.value_size)
        qkv = operators.causal_conv(qkvz[:, :channels], exact(4, channels), None, inputs, batch)
        rates, gates = (
            StateRates(exact(heads.num_heads), exact(heads.num_heads)),
            empty(num_tokens, 2 * heads.num_heads),
        )
        mixed = operators.gated_delta(qkv, gates, rates, delta, heads, batch, kept)
        for scaling in Scaling:
            operators.gated_rms_norm(mixed, qkvz[:, channels:], exact(heads.value_dim), 1e-6, scaling)
            operators.multiply_sigmoid(mixed, qkvz[:, channels:], scaling)
            operators.rms_norm_of_gated(mixed, qkvz[:, channels:], exact(heads.value_size), 1e-6, 8, scaling)
        operators.causal_conv(qkvz[:, :channels], exact(4, channels), exact(channels), inputs, batch)
        step = empty(num_tokens, heads.num_heads)
        operators.state_space(qkv, step, rates, exact(heads.num_heads), delta, heads, batch, kept)
        if has_drafts:
            operators.keep_inputs(qkv, old_qkv, batch)
    x = empty(64, 2048)
    add_gated_triton(x, x, x, x[0])


def short_convolutions() -> None:
    """Compile one of LFM2: 2,048 channels beside 8 KV heads of 64."""
    x, cache = (torch.empty(size, dtype=torch.bfloat16, device="meta") for size in ((64, 1024), (9, 2, 8, 16, 64)))
    weight, indices = (
        torch.empty(1024, 3, dtype=x.dtype, device="meta"),
        torch.empty(65, dtype=torch.int32, device="meta"),
    )
    places = torch.empty(64, dtype=torch.int64, device="meta")
    tokens = ConvolvedTokens(indices[1:], indices, places, places, indices[:64, None])
    short_conv_triton(x, weight, None, cache, tokens, x)
    short_conv_triton(x, weight, weight[:, 0], cache, tokens, x)


def w4_linear_layers() -> None:
    """Compile each width, with each kind of offset, and groups of 32 inputs in tiles of 64 outputs."""
    for num_outputs, num_inputs, group, is_gated in ((28_672, 4096, 128, True), (576, 1536, 32, False)):
        tile_rows, tile_inputs = 128 if num_outputs % 128 == 0 else 64, min(64, group)
        tiles = num_outputs // tile_rows
        words = (tiles, num_inputs // tile_inputs, tile_rows * tile_inputs // 8)
        for offset in Offset:
            parts = 1 if offset is Offset.NONE else 2
            scales = torch.empty(tiles, num_inputs // group, parts, tile_rows, dtype=torch.float16, device="meta")
            weight = W4Weight(torch.empty(words, dtype=torch.int32, device="meta"), scales, group, is_gated, offset)
            dequantize(weight)
            for num_rows in (1, 16, 32, 64, 256):
                w4_linear(torch.empty(num_rows, num_inputs, dtype=torch.bfloat16, device="meta"), weight)
            w4_one_row(torch.empty(1, num_inputs, dtype=torch.bfloat16, device="meta"), weight)


class At8Bytes(torch.Tensor):
    """A tensor without memory that starts at a multiple of 8 bytes, not of 16."""

    def __new__(cls, tensor: torch.Tensor) -> "At8Bytes":
        return torch.Tensor._make_subclass(cls, tensor)

    def data_ptr(self) -> int:
        return 8


def sampling(vocab_size: int, dtype: torch.dtype) -> Callable[[], object]:
    def empty(*size: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device="meta")

    integers, numbers = empty(256, dtype=torch.int64), empty(256, dtype=torch.float64)
    rows = SamplingRows(integers, integers, numbers, numbers, integers, numbers, integers, integers)
    # As with an odd number of rows, whose parameters are slices of one tensor.
    odd_integers, odd_numbers = At8Bytes(integers), At8Bytes(numbers)
    odd = SamplingRows(integers, integers, odd_numbers, numbers, odd_integers, odd_numbers, integers, odd_integers)

    def launch() -> None:
        scores = empty(256, vocab_size, dtype=dtype)
        sample_tokens_triton(scores, None)
        sample_tokens_triton(scores, rows)
        sample_tokens_triton(scores, odd)
        masks, numbers_of_rows = empty(32, -(-vocab_size // 32), dtype=torch.int32), empty(32, dtype=torch.int32)
        apply_token_bitmask_triton(scores, numbers_of_rows, masks)
        apply_token_bitmask_triton(scores, At8Bytes(numbers_of_rows), masks)
        counts, rows_of_counts = empty(64, counts_width(vocab_size), dtype=torch.int16), At8Bytes(numbers_of_rows)
        log_normalizers_triton(scores)
        for rows_of in (numbers_of_rows, rows_of_counts):
            spans, token_ids = empty(32, 4, dtype=torch.int32), empty(999, dtype=torch.int32)
            recount_triton(counts, rows_of, token_ids, spans)
            count_drawn_triton(counts, rows_of, rows_of, empty(256, dtype=torch.int64))
            penalized, penalties = empty(128, vocab_size, dtype=torch.float32), empty(32, 3, dtype=torch.float32)
            apply_penalties_triton(penalized, rows_of, counts, rows_of, penalties)

    return launch


def skinny_linear_layers() -> None:
    """Compile every linear layer of an 8B model, at the smallest and largest number of rows that have tiles."""
    for num_outputs, num_inputs, is_gated in linear_shapes_of(MODELS["Llama-3.1-8B"]).values():
        weight = torch.empty(num_outputs * (1 + is_gated), num_inputs, dtype=torch.bfloat16, device="meta")
        for num_rows in (1, 16, 17, 64, 65, 128):
            tiles = tiles_of((num_outputs, num_inputs, is_gated), num_rows)
            if tiles is None:
                continue
            x = torch.empty(num_rows, num_inputs, dtype=torch.bfloat16, device="meta")
            (gated_skinny_linear if is_gated else skinny_linear)(x, weight, tiles)
            if (num_outputs, num_rows) == (128_256, 64):  # output head, whose logits are float32
                logits = torch.empty(num_rows, num_outputs, dtype=torch.float32, device="meta")
                skinny_linear(x, weight, tiles, logits)


def biased_linear_layers() -> None:
    """Compile layers of gpt-oss, whose 2,880 inputs are cut in steps of 64, and a gated layer, all with a bias."""
    shapes = linear_shapes_of(MODELS["gpt-oss-20b"])
    for num_outputs, num_inputs, is_gated in (shapes["qkv"], shapes["o"], (2880, 2880, True)):
        weight = torch.empty(num_outputs * (1 + is_gated), num_inputs, dtype=torch.bfloat16, device="meta")
        for num_rows in (1, 64):
            tiles = tiles_of((num_outputs, num_inputs, is_gated), num_rows)
            if tiles is not None:
                x = torch.empty(num_rows, num_inputs, dtype=torch.bfloat16, device="meta")
                (gated_skinny_linear if is_gated else skinny_linear)(x, weight, tiles, bias=weight[:, 0].contiguous())


def fp8_linear_layers() -> None:
    """Compile a gated and a plain linear layer of an 8B model at most and fewest rows, and row quantization."""
    shapes = linear_shapes_of(MODELS["Llama-3.1-8B"])
    for shape, numbers_of_rows in ((shapes["gate_up"], (1, 64)), (shapes["down"], (32, 64, 128))):
        num_outputs, num_inputs, is_gated = shape
        weight = torch.empty(num_outputs * (1 + is_gated), num_inputs, dtype=torch.float8_e4m3fn, device="meta")
        of_blocks = torch.empty(len(weight) // 128, num_inputs // 128, device="meta")
        of_rows = torch.empty(len(weight), device="meta")
        for num_rows in numbers_of_rows:
            x = torch.empty(num_rows, num_inputs, dtype=torch.bfloat16, device="meta")
            for scales, quantize in ((of_rows, quantize_rows), (of_blocks, quantize_groups)):
                tiles = fp8_tiles(shape, num_rows, scales is of_blocks)
                assert tiles is not None
                (gated_fp8_linear if is_gated else fp8_linear)(quantize(x), Scaled(weight, scales), tiles)
    x = torch.empty(64, 4096, dtype=torch.bfloat16, device="meta")
    for is_grouped in (False, True):
        add_rms_norm_quantized(x, x, x[0], 1e-5, is_grouped, keeps_plain=is_grouped)
    silu_and_mul_quantized(x)


def experts(model: ExpertModel) -> Callable[[], object]:
    """Compile the router, and the products in both forms; those of 4 bits have one."""

    def empty(*size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device="meta")

    def product(num_outputs: int, num_inputs: int, boxes: int) -> ExpertProduct:
        num_experts = model.router.num_experts + model.router.num_shared
        if model.format == "bf16":
            return ExpertProduct(empty(num_experts, num_outputs, num_inputs))
        if model.format == "int4":
            groups = num_inputs // 128
            values = empty(num_experts, num_outputs, groups, 64, dtype=torch.uint8)
            return ExpertProduct(Int4Experts(values, empty(num_experts, groups, num_outputs, dtype=torch.float16)))
        tiles = (num_experts, num_outputs // (64 * boxes), num_inputs // 64)
        words = (empty(*tiles, boxes * size, dtype=torch.int32) for size in (512, 32))
        return ExpertProduct(Mxfp4Experts(*words), empty(num_experts, num_outputs))

    def launch() -> None:
        halves = num_halves(model.activation)
        first, down = product(halves * model.inner, model.hidden, halves), product(model.hidden, model.inner, 1)
        for num_tokens in (1, 32, 256, 2048):  # each way of routing
            x = empty(num_tokens, model.hidden)
            routing = route_triton(x, empty(model.router.num_logits, model.hidden), model.router)
            if model.format in {"bf16", "int4"}:
                apply_experts_triton(x, routing, first, down, model.activation)
            for weights, activation in ((first, model.activation), (down, None)):
                tiles = list_tiles_of(weights.weight, num_halves(activation) == 2, routing)
                if tiles is not None:
                    sorted_rows = gather_rows(empty(num_tokens, weights.weight.shape[2]), routing)  # type: ignore[union-attr]
                    has_tokens = activation is not None and reads_tokens(routing)
                    rows = x if has_tokens else sorted_rows
                    list_product(rows, weights, routing, activation, tiles)

    return launch


def summing() -> None:
    own, peer = (torch.empty(MEMORY_BYTES // 2, dtype=torch.bfloat16, device="meta") for _ in range(2))
    exchange = Exchange(own, peer, torch.empty(MAX_BLOCKS, dtype=torch.int32, device="meta"))
    for num_rows in (1, 256):
        all_reduce_two(torch.empty(num_rows, 4096, dtype=torch.bfloat16, device="meta"), exchange)


def summing_and_norming() -> None:
    for size, hidden in ((2, 4096), (2, 8192), (4, 4096)):
        own = torch.empty(memory_elements(size), dtype=torch.int16, device="meta")
        buffers = torch.empty(size, dtype=torch.int64, device="meta")
        exchange = RowExchange(1, own, buffers, torch.empty(max_rows(size), dtype=torch.int32, device="meta"))
        x = torch.empty(64, hidden, dtype=torch.bfloat16, device="meta")
        sum_add_rms_norm(x, x, x[0], 1e-5, exchange)
        sum_add_rms_norm(x, x, x[0], 1e-5, replace(exchange, max_spins=2**22))
        sum_add_rms_norm_quantized(x, x, x[0], 1e-5, exchange, is_grouped=hidden == 8192)


def unpacking() -> None:
    def empty(*size: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device="meta")

    def wide() -> torch.Tensor:
        return empty(8192, dtype=torch.int64)

    others = ("num", "row", "drafted")
    lists = {name: empty(8192) for name in DescribedBatch.__annotations__ if not name.startswith(others)}
    described = DescribedBatch(**lists, num_sequences=250, num_tokens=250, num_logits=250, row_stride=65)
    slots, tables = empty(1, 8192, dtype=torch.int64), empty(1, 256, 8192)  # of one group
    inputs = InputTensors(wide(), wide(), slots, empty(257), empty(256), tables, wide(), wide())
    unpack_inputs_triton(described, wide(), inputs, 256, 16)
    last = LastDrafts(wide(), wide(), empty(256), empty(3, 256, dtype=torch.int64), 2)
    unpack_inputs_triton(described, wide(), inputs, 256, 16, last=last)
    states = empty(3, 257)
    with_states = replace(described, drafted_states=states), wide(), replace(inputs, drafted_states=states)
    unpack_inputs_triton(*with_states, 256, 16, last=last)


def drafting() -> None:
    def empty(*size: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device="meta")

    def narrow(*size: int) -> torch.Tensor:
        return empty(*size, dtype=torch.int32)

    step = SampledStep(empty(256), empty(256), narrow(257), empty(256), empty(256), narrow(256), narrow(64), narrow(64))
    places = DraftPlaces(empty(64), narrow(64), empty(64), narrow(64), empty(1, 64), narrow(1, 64, 8192))
    last = LastDrafts(empty(256), places.kept_rows, places.kept_positions, empty(3, 64), 2)
    begin_drafts_triton(step, last)
    place_drafts_triton(places, 1, 8192, 16)
    table = TokenTable(narrow(64, 8192), narrow(64))
    record_tokens_triton(step, last, table)
    ngram_drafts_triton(last, table, NgramLengths(2, 4), last.drafts)


def describe(case: str, kernel: CompiledKernel, report: str) -> dict[str, object]:
    ptx = kernel.asm["ptx"]
    return {
        "case": case,
        "kernel": kernel.metadata.name,
        "hash": kernel.hash,
        "registers": int(_search(r"Used (\d+) registers", report)),
        "spill_bytes": sum(map(int, re.findall(r"(\d+) bytes spill", report))),
        "shared_bytes": kernel.metadata.shared,
        "num_warps": kernel.metadata.num_warps,
        "async_copies_16_bytes": len(re.findall(r"cp\.async\.cg\.shared\.global \[[^;]*0x10", ptx)),
        "async_copies_narrower": len(re.findall(r"cp\.async\.ca", ptx)),
        "bulk_copies": len(re.findall(r"cp\.async\.bulk\.tensor", ptx)),
        "waits_for_the_kernel_before": ptx.count("griddepcontrol.wait"),
        "wgmma": ptx.count("wgmma.mma_async"),
        "pairs_from_e4m3": ptx.count("cvt.rn.f16x2.e4m3x2"),
        "loads_of_operands": len(re.findall(r"ldmatrix\.", ptx)),
        "mma": len(re.findall(r"\bmma\.sync", ptx)),
    }


def _search(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    assert match is not None, f"{pattern} not in: {text}"
    return match.group(1)


def main(part: int, num_parts: int) -> None:
    cases = {
        "attention llama-8b bf16 block 16": attention("llama-8b", torch.bfloat16, 16),
        "attention smollm2-135m bf16 block 16": attention("smollm2-135m", torch.bfloat16, 16),
        "attention llama-8b bf16 block 64": attention("llama-8b", torch.bfloat16, 64),
        "attention llama-8b fp32 block 16": attention("llama-8b", torch.float32, 16),
        "attention in splits llama-8b bf16": attention_in_splits("llama-8b"),
        "attention llama-8b fp8 kv block 16": attention("llama-8b", torch.bfloat16, 16, E4M3),
        "attention smollm2-135m fp8 kv block 16": attention("smollm2-135m", torch.bfloat16, 16, E4M3),
        "attention llama-8b fp8 kv block 64": attention("llama-8b", torch.bfloat16, 64, E4M3),
        "attention in splits llama-8b fp8 kv": attention_in_splits("llama-8b", E4M3),
        "attention llama-8b bf16 window and sinks": attention("llama-8b", torch.bfloat16, 16, rules=WINDOWED),
        "attention llama-8b fp8 kv window and softcap": attention("llama-8b", torch.bfloat16, 16, E4M3, CAPPED),
        "attention in splits llama-8b bf16 window and sinks": attention_in_splits("llama-8b", rules=WINDOWED),
        "attention gemma3-4b bf16 wide heads": attention("gemma3-4b", torch.bfloat16, 16),
        "attention gemma3-4b fp8 kv wide heads": attention("gemma3-4b", torch.bfloat16, 16, E4M3, ScoreRules(1024)),
        "attention in splits llama-8b bf16 drafts": attention_in_splits("llama-8b", max_joined=4),
        "attention llama-8b bf16 drafts": attention("llama-8b", torch.bfloat16, 16, max_joined=4),
        "attention llama-8b fp8 kv drafts": attention("llama-8b", torch.bfloat16, 16, E4M3, WINDOWED, 4),
        "sampling llama-8b bf16": sampling(128_256, torch.bfloat16),
        "sampling smollm2-135m fp32": sampling(49_152, torch.float32),
        "tokens llama-8b bf16": token_kernels("llama-8b", torch.bfloat16),
        "tokens smollm2-135m bf16": token_kernels("smollm2-135m", torch.bfloat16),
        "tokens llama-8b fp8 kv": token_kernels("llama-8b", torch.bfloat16, E4M3),
        "linear layers llama-8b bf16": skinny_linear_layers,
        "linear layers gpt-oss bf16": biased_linear_layers,
        "fp8 linear layers llama-8b bf16": fp8_linear_layers,
        "w4 linear layers llama-8b bf16": w4_linear_layers,
        "recurrent layers bf16": recurrent_layers,
        "short convolutions bf16": short_convolutions,
        "experts gpt-oss-20b mxfp4": experts(GPT_OSS),
        "experts qwen3-30b-a3b bf16": experts(QWEN3),
        "experts qwen3-30b-a3b int4 bf16": experts(QWEN3_INT4),
        "experts qwen3.5-35b-a3b bf16": experts(QWEN35_MOE),
        "sums of two": summing,
        "sums and norms bf16": summing_and_norming,
        "unpacking": unpacking,
        "drafting": drafting,
    }
    with compile_only() as compiled:
        for case, launch in list(cases.items())[part::num_parts]:
            launch()
            for kernel, report in compiled:
                json.dump(describe(case, kernel, report), sys.stdout)
                print(flush=True)
            compiled.clear()
    json.dump(ingredients(sources_read()), sys.stdout)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
