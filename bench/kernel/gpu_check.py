"""Check every kernel on a CUDA device against its float64 reference, then time attention.

    python -m bench gpu-check --out DIR

Prints one line per case and writes DIR/gpu_check.json. The exit status is 1 if a case failed, raised, or exceeded the
time limit; the other cases still run. The cases are also the GPU tests of tests/kernels.
"""

import argparse
import json
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.testing import do_bench

from bench.kernel.attention_checks import (
    MIXED,
    check_attention,
    check_captured,
    check_chunks,
    check_for_every_device,
    check_invariance,
    check_tilings,
)
from bench.kernel.cases import (
    HEAD_SHAPES,
    HIDDEN,
    Check,
    Error,
    attention_batch,
    measure_error,
    poisoned,
    rounding_tolerance,
    same_bits,
)
from bench.kernel.expert_checks import expert_checks
from bench.kernel.fp8_checks import fp8_checks
from bench.kernel.fp8_kv_checks import fp8_kv_checks
from bench.kernel.linear_shapes import MODELS, Shape, linear_shapes_of
from bench.kernel.score_rules_checks import score_rules_checks
from bench.kernel.w4_checks import w4_checks
from kernels.attention.paged_attention import paged_attention
from kernels.kv_block_copy import copy_kv_blocks
from kernels.rms_norm import add_rms_norm, rms_norm, rms_norm_reference
from kernels.rotary_embedding import QkNorms, RotaryInput, rotate_and_store, rotate_reference, store_kv_reference
from kernels.silu_and_mul import silu_and_mul, silu_and_mul_reference
from kernels.skinny_linear import gated_skinny_linear, skinny_linear
from kernels.skinny_linear_tiles import tiles_for, tiles_of

READ_CEILING_BYTES_PER_SECOND = 4.62e12  # measured on an H200: reads only
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# name: (cached tokens, new tokens) per sequence
LENGTHS: dict[str, list[tuple[int, int]]] = {
    "decode 1": [(1000, 1)],
    "decode 1 long": [(20_000, 1)],
    "decode 32 ragged": [(37 * i, 1) for i in range(32)],
    "decode 256": [(100 + i, 1) for i in range(256)],
    "prefill 1": [(0, 1500)],
    "prefill ragged": [(0, 1), (0, 2), (0, 63), (0, 64), (0, 65), (300, 129), (17, 700)],
    "mixed": MIXED,
}
LONG_PREFILL = [(0, 8192)]
TIMED: dict[str, list[tuple[int, int]]] = {
    **{f"decode {b} x {n}": [(n - 1, 1)] * b for b, n in ((1, 1024), (1, 8192), (16, 1024), (16, 8192))},
    **{f"decode {b} x {n}": [(n - 1, 1)] * b for b, n in ((64, 1024), (64, 8192), (256, 1024))},
    "prefill 1 x 8192": [(0, 8192)],
    "prefill 8 x 1024": [(0, 1024)] * 8,
    "mixed 64 x 1024 + 2048 new": [*[(1023, 1)] * 64, (0, 2048)],
}


def check_token_kernels(shape: str, num_tokens: int, dtype: torch.dtype) -> Check:
    """Check RMSNorm with and without addition, and the SiLU gate, on strided views."""
    hidden, intermediate = HIDDEN[shape]

    def check(generator: torch.Generator) -> list[Error]:
        def random(*size: int) -> Tensor:
            return torch.randn(size, dtype=dtype, device=generator.device, generator=generator)

        tolerance = rounding_tolerance(dtype)
        x, residual, weight = random(num_tokens, 2 * hidden)[:, :hidden], random(num_tokens, hidden), random(hidden)
        normed = poisoned(lambda: rms_norm(x, weight, 1e-5))
        added, new_residual = poisoned(lambda: add_rms_norm(x, residual, weight, 1e-5))
        gate_up = 3 * random(num_tokens, 2 * intermediate)
        gated = poisoned(lambda: silu_and_mul(gate_up))
        return [
            measure_error(normed, rms_norm_reference(x.double(), weight.double(), 1e-5), tolerance),
            measure_error(new_residual, x.double() + residual.double(), tolerance),
            measure_error(added, rms_norm_reference(new_residual.double(), weight.double(), 1e-5), tolerance),
            measure_error(gated, silu_and_mul_reference(gate_up.double()), tolerance),
        ]

    return check


def check_rotation(
    shape: str, num_tokens: int, dtype: torch.dtype, block_size: int, has_norms: bool = False, is_scaled: bool = False
) -> Check:
    """Check queries and keys, rotated in place, and stored keys and values; no other byte changes.

    `has_norms`: queries and keys are normed before. `is_scaled`: rotated queries have a factor by position.
    """
    heads = HEAD_SHAPES[shape]

    def check(generator: torch.Generator) -> list[Error]:
        device, kv_heads, rotated = generator.device, heads.num_kv_heads, heads.num_heads + heads.num_kv_heads
        pool = torch.full((130, 2, 2, kv_heads, block_size, heads.head_dim), torch.nan, dtype=dtype, device=device)
        qkv = torch.randn(num_tokens, rotated + kv_heads, heads.head_dim, device=device, generator=generator).to(dtype)
        positions = torch.randint(8192, (num_tokens,), device=device, generator=generator)
        angles = torch.rand(8192, heads.head_dim // 2, device=device, generator=generator) * 6.28
        table = torch.cat((angles.cos(), angles.sin()), dim=-1)
        slots = torch.randperm(130 * block_size, device=device, generator=generator)[:num_tokens]
        slots[1::7] = -1
        weights = torch.rand(2, heads.head_dim, device=device, generator=generator).to(dtype) + 0.5
        norms = QkNorms(weights[0], weights[1], 1e-6) if has_norms else None
        exact = qkv[:, :rotated].double()
        if norms is not None:
            query, key = exact[:, : heads.num_heads], exact[:, heads.num_heads :]
            query, key = (rms_norm_reference(x, w, norms.eps) for x, w in ((query, weights[0]), (key, weights[1])))
            exact = torch.cat((query, key), dim=1)
        exact = rotate_reference(exact, positions, table.double())
        scales = torch.rand(8192, device=device, generator=generator) + 0.5 if is_scaled else None
        if scales is not None:
            exact[:, : heads.num_heads] *= scales.double()[positions, None, None]
        values, expected = qkv[:, rotated:].clone(), pool.clone()
        caches = pool[:, 1, 0], pool[:, 1, 1]
        rotate_and_store(RotaryInput(qkv, positions, table, *caches, slots, norms, query_scales=scales))
        store_kv_reference(qkv[:, heads.num_heads : rotated], values, expected[:, 1, 0], expected[:, 1, 1], slots)
        return [
            measure_error(qkv[:, :rotated], exact, rounding_tolerance(dtype)),
            same_bits(qkv[:, rotated:], values),
            same_bits(pool.nan_to_num(7.0), expected.nan_to_num(7.0)),
        ]

    return check


def check_skinny_linear(shape: Shape, num_rows: int, *, is_biased: bool = False) -> Check:
    """Check against float64, bit by bit against cuBLAS for many rows (same order of sums), and for races."""
    num_outputs, num_inputs, is_gated = shape

    def check(generator: torch.Generator) -> list[Error]:
        def random(*size: int) -> Tensor:
            return torch.randn(size, dtype=torch.bfloat16, device=generator.device, generator=generator)

        x, weight = random(512, num_inputs), random(num_outputs * (1 + is_gated), num_inputs) * 0.02
        bias = random(len(weight)) if is_biased else None
        tiles = tiles_for(weight, num_rows, is_gated)
        assert tiles is not None, "no tiles for this device"
        operation = gated_skinny_linear if is_gated else skinny_linear
        output = poisoned(lambda: operation(x[:num_rows], weight, tiles, bias=bias))
        exact = x[:num_rows].double() @ weight.double().T + (0 if bias is None else bias.double())
        library = torch.nn.functional.linear(x, weight, bias)
        if is_gated:
            # Gate and up are rounded before the multiplication, eps / 2 each, besides the result.
            exact, library = silu_and_mul_reference(exact), silu_and_mul(library)
        return [
            measure_error(output, exact, rounding_tolerance(torch.bfloat16) * (2 if is_gated else 1)),
            same_bits(output, library[:num_rows]),
            *(same_bits(operation(x[:num_rows], weight, tiles, bias=bias), output) for _ in range(5)),
        ]

    return check


def check_head(vocab_size: int, num_inputs: int, num_rows: int) -> Check:
    """Check float32 logits: skinny_linear and cuBLAS are equal, and rounded they equal the bfloat16 ones."""

    def check(generator: torch.Generator) -> list[Error]:
        def random(*size: int) -> Tensor:
            return torch.randn(size, dtype=torch.bfloat16, device=generator.device, generator=generator)

        x, weight = random(512, num_inputs), random(vocab_size, num_inputs) * 0.02
        tiles = tiles_for(weight, num_rows, is_gated=False)
        assert tiles is not None, "no tiles for this device"
        logits = x.new_empty(num_rows, vocab_size, dtype=torch.float32)
        output = poisoned(lambda: skinny_linear(x[:num_rows], weight, tiles, logits))
        library = torch.mm(x, weight.T, out_dtype=torch.float32)
        exact = x[:num_rows].double() @ weight.double().T
        return [
            # 256 wgmma steps in a chain; each may truncate the last bit of the sum.
            measure_error(output, exact, num_inputs // 16 * torch.finfo(torch.float32).eps),
            same_bits(output, library[:num_rows]),
            same_bits(output.bfloat16(), skinny_linear(x[:num_rows], weight, tiles)),
        ]

    return check


def check_block_copies(shape: str, block_size: int, dtype: torch.dtype) -> Check:
    """Check that the whole pool equals the reference's bit for bit, because copies move bytes."""
    heads = HEAD_SHAPES[shape]

    def check(generator: torch.Generator) -> list[Error]:
        random: dict[str, Any] = {"dtype": dtype, "device": generator.device, "generator": generator}
        pool = torch.randn(64, 3, 2, heads.num_kv_heads, block_size, heads.head_dim, **random)
        expected = pool.clone()
        copies = torch.randperm(64, device=generator.device, generator=generator)[:20].view(10, 2)
        copy_kv_blocks(pool, pool, copies)
        expected[copies[:, 1]] = expected[copies[:, 0]]
        return [same_bits(pool, expected)]

    return check


# Layers of an 8B model with two heads, and of two other models, one with rows that no measured shape has.
CHECKED_PRODUCTS: tuple[Shape, ...] = (
    *linear_shapes_of(MODELS["Llama-3.1-8B"]).values(),
    (49152, 4096, False),
    *linear_shapes_of(MODELS["Qwen3-0.6B"]).values(),
    *linear_shapes_of(MODELS["Llama-3.1-8B"], num_ranks=2).values(),
    *linear_shapes_of(MODELS["gpt-oss-20b"]).values(),
)


def _linear_checks() -> dict[str, Check]:
    checks: dict[str, Check] = {}
    for num_outputs, num_inputs, is_gated in CHECKED_PRODUCTS:
        for num_rows in (1, 7, 16, 31, 64, 100):
            if tiles_of((num_outputs, num_inputs, is_gated), num_rows) is not None:
                name = f"linear {num_outputs} x {num_inputs}{' gated' if is_gated else ''} T={num_rows}"
                checks[name] = check_skinny_linear((num_outputs, num_inputs, is_gated), num_rows)
    for shape in (*linear_shapes_of(MODELS["gpt-oss-20b"]).values(), (2880, 2880, True)):
        for num_rows in (1, 16, 64):
            if tiles_of(shape, num_rows) is not None:
                name = f"linear {shape[0]} x {shape[1]}{' gated' if shape[2] else ''} with bias T={num_rows}"
                checks[name] = check_skinny_linear(shape, num_rows, is_biased=True)
    for vocab_size in (49152, 128256):
        for num_rows in (1, 16, 64):
            checks[f"head {vocab_size} x 4096 T={num_rows}"] = check_head(vocab_size, 4096, num_rows)
    return checks


def all_checks() -> dict[str, Check]:
    checks = _linear_checks() | fp8_checks() | expert_checks() | w4_checks()
    for shape in HEAD_SHAPES:
        for dtype in DTYPES:
            name = f"{shape} {str(dtype).removeprefix('torch.')}"
            for num_tokens in (1, 7, 1000):
                checks[f"tokens {name} T={num_tokens}"] = check_token_kernels(shape, num_tokens, dtype)
                checks[f"rotation {name} T={num_tokens}"] = check_rotation(shape, num_tokens, dtype, 16)
                checks[f"normed rotation {name} T={num_tokens}"] = check_rotation(shape, num_tokens, dtype, 16, True)
            checks[f"scaled rotation {name} T=300"] = check_rotation(shape, 300, dtype, 16, is_scaled=True)
            # Other block sizes compile the same code; bf16 alone keeps the run short.
            for block_size in (8, 16, 32, 64) if dtype == torch.bfloat16 else (16,):
                checks[f"block copies {name} block {block_size}"] = check_block_copies(shape, block_size, dtype)
                rotation = f"rotation {name} T=300 block {block_size}"
                checks[rotation] = check_rotation(shape, 300, dtype, block_size)
                for case, lengths in LENGTHS.items():
                    checks[f"{case}, {name} block {block_size}"] = check_attention(shape, block_size, lengths, dtype)
            checks[f"invariance {name}"] = check_invariance(shape, dtype)
            checks[f"chunks {name}"] = check_chunks(shape, dtype)
            checks[f"captured {name}"] = check_captured(shape, dtype)
            if dtype != torch.float32:
                checks[f"tilings {name}"] = check_tilings(shape, dtype)
                checks[f"mixed for every device, {name}"] = check_for_every_device(shape, dtype)
        checks[f"prefill 8192, {shape} bfloat16"] = check_attention(shape, 16, LONG_PREFILL, torch.bfloat16)
    return {**checks, **fp8_kv_checks(LENGTHS), **score_rules_checks()}


def run_checks(time_limit_seconds: float, only: list[str]) -> list[dict[str, Any]]:
    started = time.monotonic()
    chosen = {name: check for name, check in all_checks().items() if not only or name.startswith(tuple(only))}
    return [run_check(name, check, started + time_limit_seconds) for name, check in chosen.items()]


def run_check(name: str, check: Check, deadline: float) -> dict[str, Any]:
    started = time.monotonic()
    if started > deadline:
        return {"case": name, "passed": False, "note": "not run: time limit exceeded"}
    result: dict[str, Any] = {"case": name}
    try:
        errors = check(torch.Generator(device="cuda").manual_seed(len(name)))
        torch.cuda.synchronize()
        result |= {"passed": all(error.passed for error in errors), "errors": [vars(error) for error in errors]}
    except Exception as exception:  # the table shows the case as failed, and the others still run
        last_line = (str(exception).strip().splitlines() or [""])[-1]
        result |= {"passed": False, "note": f"{type(exception).__name__}: {last_line}"[:200]}
        result["traceback"] = traceback.format_exc()
    return result | {"seconds": time.monotonic() - started}


def time_attention(name: str, lengths: list[tuple[int, int]]) -> dict[str, Any]:
    """Return the median time, and bytes of KV (decode) or operations (prefill) per second."""
    shape = HEAD_SHAPES["llama-8b"]
    generator = torch.Generator(device="cuda").manual_seed(0)
    batch = attention_batch(shape, 16, lengths, torch.bfloat16, generator)
    seconds = do_bench(lambda: paged_attention(**vars(batch)), warmup=20, rep=80, return_mode="median") / 1e3
    read_bytes = sum(cached + new for cached, new in lengths) * 2 * shape.num_kv_heads * shape.head_dim * 2
    seen_keys = sum(new * cached + new * (new + 1) // 2 for cached, new in lengths)
    return {
        "case": name,
        "microseconds": seconds * 1e6,
        "read_ceiling_ratio": read_bytes / seconds / READ_CEILING_BYTES_PER_SECOND,
        "teraflops_per_second": 4 * seen_keys * shape.num_heads * shape.head_dim / seconds / 1e12,
    }


def print_checks(results: list[dict[str, Any]]) -> None:
    print(f"{'case':58s} {'norm':>9s} {'worst':>9s} {'tolerance':>9s} {'s':>5s}")
    for result in results:
        errors = result.get("errors") or [{}]
        shown = max(errors, key=lambda error: error.get("norm_ratio", 0))
        numbers = " ".join(f"{shown.get(key, float('nan')):9.1e}" for key in ("norm_ratio", "worst_ratio", "tolerance"))
        verdict = "ok" if result["passed"] else f"FAILED {result.get('note', '')}"
        print(f"{result['case']:58s} {numbers} {result.get('seconds', 0):5.1f} {verdict}")


def print_timings(timings: list[dict[str, Any]]) -> None:
    print(f"\n{'attention, llama-8b bf16 block 16':40s} {'us':>9s} {'of read ceiling':>16s} {'TFLOP/s':>8s}")
    for timing in timings:
        print(
            f"{timing['case']:40s} {timing['microseconds']:9.1f} {timing['read_ceiling_ratio']:16.2f} "
            f"{timing['teraflops_per_second']:8.0f}"
        )


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", metavar="PATH", type=Path, required=True, help="folder for gpu_check.json")
    parser.add_argument(
        "--time-limit-seconds",
        metavar="SECONDS",
        type=float,
        default=110.0,
        help="time limit; later checks count as failed (default: %(default)s)",
    )
    parser.add_argument("--no-timings", action="store_true")
    parser.add_argument("--only", metavar="NAME", nargs="*", default=[], help="name prefixes of the cases to run")
    options = parser.parse_args(argv)
    results = run_checks(options.time_limit_seconds, options.only)
    timings = [] if options.no_timings else [time_attention(name, lengths) for name, lengths in TIMED.items()]
    print_checks(results)
    print_timings(timings)
    failed = [result for result in results if not result["passed"]]
    for result in failed[:3]:
        print(f"\n{result['case']}\n{result.get('traceback', '')[-1500:]}")
    print(f"\n{len(results) - len(failed)} of {len(results)} passed on {torch.cuda.get_device_name()}", end=", ")
    print(f"torch {torch.__version__}, triton {triton.__version__}")
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "gpu_check.json").write_text(json.dumps({"checks": results, "timings": timings}, indent=1))
    return 1 if failed else 0
