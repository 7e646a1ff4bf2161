"""Measure paged attention of an 8B model's layers as a step replays them.

    python -m bench attention --out DIR [--layouts] [--kv-dtype fp8]

A CUDA graph holds the layers of one plan with at least 256 MB of keys and values, so no call finds its own in L2. The
result is the median per layer. The plan has the bounds of a captured decode, and blocks are random. `--layouts` times
both orders of blocks and layers in an 84 GB pool. `--kv-dtype fp8` compares bf16 and e4m3 caches, and the
configurations of FP8_FORMS (kernels/attention/decode_shares.py). Writes DIR/attention.json; gpu_check.py checks.
"""

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from torch import Tensor

from bench.kernel.cases import HEAD_SHAPES
from bench.kernel.gpu_check import READ_CEILING_BYTES_PER_SECOND
from kernels.attention import paged_attention
from kernels.attention.decode_shares import ShareConfig
from kernels.attention.paged_attention import AttentionPlan
from kernels.fp8_kv import E4M3

BLOCK_SIZE = 16
MODEL_LEN_TOKENS = 131072
ROTATED_BYTES = 256 * 2**20
POOL_BLOCKS, MODEL_LAYERS = 40_000, 32
REPLAYS = 12

Lengths = list[tuple[int, int]]  # (cached tokens, new tokens) per sequence
DECODE: dict[str, Lengths] = {
    f"decode {batch} x {length}": [(length - 1, 1)] * batch for length in (1024, 8192) for batch in (1, 16, 64, 256)
}
RAGGED: dict[str, Lengths] = {
    "decode 256 x 100..1500": [(100 + 1400 * i // 255 - 1, 1) for i in range(256)],
    "decode 16 x 16384": [(16383, 1)] * 16,
    "decode 1 x 131072": [(131071, 1)],
    "decode 1 x 40000 + 63 x 500": [(39999, 1), *[(499, 1)] * 63],
}
PREFILL: dict[str, Lengths] = {
    **{f"prefill {length}": [(0, length)] for length in (1024, 2048, 8192, 32768)},
    "prefill 8 x 1024": [(0, 1024)] * 8,
    "prefill 2048 after 6144": [(6144, 2048)],
    "mixed 64 x 1024 + 2048 new": [*[(1023, 1)] * 64, (0, 2048)],
}
KV_CASES = {
    **{name: DECODE[name] for name in ("decode 64 x 8192", "decode 256 x 1024", "decode 16 x 1024", "decode 1 x 8192")},
    **{name: RAGGED[name] for name in ("decode 16 x 16384", "decode 256 x 100..1500")},
    **{name: PREFILL[name] for name in ("prefill 8192", "prefill 2048 after 6144")},
}
FP8_FORMS = tuple(
    ShareConfig(tile=tile, num_stages=stages, programs_per_sm=programs, tail=tail)
    for tile, stages, programs in ((32, 3, 8), (32, 4, 6), (32, 6, 4), (32, 2, 12), (64, 2, 6), (64, 3, 4))
    for tail in (0, 2)
)
LAYOUT_CASES = ("decode 64 x 1024", "decode 256 x 1024", "decode 16 x 16384")


def replay_seconds(launch: Callable[[], object]) -> float:
    """Return the median time of a CUDA graph of `launch`, which must have run before."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    times = []
    for replay in range(REPLAYS + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        if replay >= 3:
            times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


def random_pool(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    pool = torch.empty(shape, dtype=dtype, device="cuda")
    for piece in pool.view(-1).split(2**30):
        piece.copy_(torch.randn(piece.shape, dtype=torch.bfloat16, device="cuda"))
    return pool


def random_tables(lengths: Lengths, num_blocks: int) -> Tensor:
    """Return [S, B] distinct block ids; block 0 is unused."""
    used = [-(-(cached + new) // BLOCK_SIZE) for cached, new in lengths]
    ids = 1 + torch.randperm(num_blocks - 1)[: sum(used)]
    tables = torch.zeros(len(lengths), max(used), dtype=torch.int32)
    for row, row_ids in enumerate(ids.split(used)):
        tables[row, : len(row_ids)] = row_ids
    return tables.cuda()


def time_layers(name: str, lengths: Lengths, layers: list[tuple[Tensor, Tensor]]) -> dict[str, Any]:
    shape = HEAD_SHAPES["llama-8b"]
    new = torch.tensor([new for _, new in lengths])
    query = torch.randn(int(new.sum()), shape.num_heads, shape.head_dim, dtype=torch.bfloat16, device="cuda")
    starts = torch.nn.functional.pad(new.cumsum(0), (1, 0)).to("cuda", torch.int32)
    seq_lens = torch.tensor([sum(pair) for pair in lengths], dtype=torch.int32, device="cuda")
    tables = random_tables(lengths, layers[0][0].shape[0])
    bounds = (int(new.max()), MODEL_LEN_TOKENS)

    plan = AttentionPlan(tables, starts, seq_lens, *bounds, shape.num_heads, layers[0][0])
    torch.cuda.synchronize()

    def attend() -> None:
        for key_cache, value_cache in layers:
            plan.attend(query, key_cache, value_cache, shape.head_dim**-0.5)

    attend()
    seconds = replay_seconds(attend) / len(layers)
    read_bytes = int(seq_lens.sum()) * 2 * shape.num_kv_heads * shape.head_dim * layers[0][0].itemsize
    seen_keys = sum(new * cached + new * (new + 1) // 2 for cached, new in lengths)
    return {
        "case": name,
        "layers": len(layers),
        "microseconds": seconds * 1e6,
        "read_bytes": read_bytes,
        "read_ceiling_ratio": read_bytes / seconds / READ_CEILING_BYTES_PER_SECOND,
        "teraflops_per_second": 4 * seen_keys * shape.num_heads * shape.head_dim / seconds / 1e12,
    }


def time_case(name: str, lengths: Lengths, dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    """Time one case; `dtype` is that of the cache."""
    shape = HEAD_SHAPES["llama-8b"]
    num_blocks = 1 + sum(-(-sum(pair) // BLOCK_SIZE) for pair in lengths)
    block_bytes = 2 * shape.num_kv_heads * BLOCK_SIZE * shape.head_dim * dtype.itemsize
    num_layers = max(4, -(-ROTATED_BYTES // (num_blocks * block_bytes)))
    pool = random_pool(num_blocks, num_layers, 2, shape.num_kv_heads, BLOCK_SIZE, shape.head_dim, dtype=dtype)
    layers = [(pool[:, layer, 0], pool[:, layer, 1]) for layer in range(num_layers)]
    return time_layers(name, lengths, layers)


def time_kv_dtypes() -> list[dict[str, Any]]:
    timings = []
    for name, lengths in KV_CASES.items():
        wide = time_case(f"{name}, bf16", lengths)
        narrow = time_case(f"{name}, fp8", lengths, E4M3)
        print(f"{name:28s} bf16 {wide['microseconds']:8.1f} us, fp8 {narrow['microseconds']:8.1f}", end="")
        print(f" = {narrow['microseconds'] / wide['microseconds']:.3f} of it", flush=True)
        timings += [wide, narrow]
        for form in FP8_FORMS if name.startswith("decode") else ():
            with mock.patch.object(paged_attention, "share_config", lambda *_, form=form, **__: form):
                case = (
                    f"{name}, fp8, {form.tile} x {form.num_stages}, {form.programs_per_sm} programs, tail {form.tail}"
                )
                timings.append(time_case(case, lengths, E4M3))
        torch.cuda.empty_cache()
    return timings


def time_layouts() -> list[dict[str, Any]]:
    shape = HEAD_SHAPES["llama-8b"]
    block = (2, shape.num_kv_heads, BLOCK_SIZE, shape.head_dim)
    pool = random_pool(POOL_BLOCKS, MODEL_LAYERS, *block)
    by_layer = pool.view(MODEL_LAYERS, POOL_BLOCKS, *block)
    orders = {
        "block-major": [(pool[:, layer, 0], pool[:, layer, 1]) for layer in range(MODEL_LAYERS)],
        "layer-major": [(by_layer[layer, :, 0], by_layer[layer, :, 1]) for layer in range(MODEL_LAYERS)],
    }
    cases = {**DECODE, **RAGGED}
    return [
        time_layers(f"{case}, {order}", cases[case], layers)
        for case in LAYOUT_CASES
        for _ in range(2)
        for order, layers in orders.items()
    ]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", metavar="PATH", type=Path, required=True, help="folder for attention.json")
    parser.add_argument("--layouts", action="store_true", help="time both layouts of an 84 GB pool, too")
    parser.add_argument(
        "--kv-dtype",
        choices=("bf16", "fp8"),
        default="bf16",
        help="fp8: only compare fp8 with bf16 (default: %(default)s)",
    )
    options = parser.parse_args(argv)
    timings = time_kv_dtypes() if options.kv_dtype == "fp8" else []
    for name, lengths in {**DECODE, **RAGGED, **PREFILL}.items() if options.kv_dtype == "bf16" else ():
        timings.append(time_case(name, lengths))
        torch.cuda.empty_cache()
    timings += time_layouts() if options.layouts else []
    print(f"{'attention, llama-8b bf16 block 16':64s} {'us/layer':>10s} {'of read ceiling':>16s} {'TFLOP/s':>8s}")
    for timing in timings:
        print(
            f"{timing['case']:64s} {timing['microseconds']:10.1f} {timing['read_ceiling_ratio']:16.3f} "
            f"{timing['teraflops_per_second']:8.0f}"
        )
    versions = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "attention.json").write_text(json.dumps({"versions": versions, "timings": timings}, indent=1))
    return 0
