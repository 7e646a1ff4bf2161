"""Measure figures 18 and 19 on a CUDA device: python3 -m bench.paper.device --out DIR.

    attention   decode through a scattered block table, an ordered one, and torch's on contiguous KV (18a)
    block size  the same decode with blocks of 1 to 256 tokens (kernel half of 18b)
    swap        a sequence's KV to the host and back, in blocks of 1 to 256 tokens, in three ways (19a):
                pieces      one copy per block, layer, key and value: the paper's layout
                blocks      one copy per block with all layers: our layout
                host pool   the worker's transfer: gathered on the device and sent in long runs

Kernel times are CUDA graph replays. Transfer times are wall-clock time until the last copy ends, including host work.
A case that raises is recorded, and the others still run.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from triton.testing import do_bench_cudagraph

from bench.kernel.cases import HEAD_SHAPES, AttentionBatch, HeadShape, attention_batch
from engine_worker.execution.step.host_pool import CudaHostPool
from engine_worker.kv.transfers import BlockCopy, Moves
from kernels.attention.paged_attention import paged_attention

OPT_13B = HeadShape(40, 40, 128)
LLAMA_8B = HEAD_SHAPES["llama-8b"]
ATTENTION_CASES = [
    *[("OPT-13B", OPT_13B, count, context) for count in (8, 32) for context in (64, 128, 256)],
    *[("Llama-3.1-8B", LLAMA_8B, count, context) for count, context in ((8, 256), (32, 256), (64, 1024), (64, 8192))],
]
BLOCK_SIZES = [1, 2, 4, 8, 16, 32, 64, 128, 256]
BLOCK_SIZE_CASE = (32, 1024)  # sequences, context tokens
SWAPPED_TOKENS = [256, 1024]
NUM_LAYERS = 32
REPEATS = 5
DTYPE = torch.bfloat16


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python3 -m bench.paper.device", description=__doc__.split("\n")[0])
    parser.add_argument("--out", metavar="PATH", type=Path, required=True)
    options = parser.parse_args(argv)
    result: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "dtype": str(DTYPE)}
    result["attention"] = [attempt(attention_case, *case) for case in ATTENTION_CASES]
    result["block_size"] = [attempt(block_size_case, block_size) for block_size in BLOCK_SIZES]
    result["swap"] = [attempt(swap_case, tokens, size) for tokens in SWAPPED_TOKENS for size in BLOCK_SIZES]
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "paper_device.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    for name in ("attention", "block_size", "swap"):
        print(name, *map(json.dumps, result[name]), sep="\n  ")
    return 0


def attempt(case: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    try:
        return case(*arguments)
    except Exception as error:
        return {"case": [str(argument) for argument in arguments], "error": f"{type(error).__name__}: {error}"[:300]}


def attention_case(model: str, shape: HeadShape, num_sequences: int, context_tokens: int) -> dict[str, Any]:
    scattered = _decode_batch(shape, 16, num_sequences, context_tokens)
    width = -(-context_tokens // 16)
    ids = torch.arange(1, num_sequences * width + 1, dtype=torch.int32, device="cuda").view(num_sequences, width)
    tables = scattered.block_tables.clone()
    tables[:, :width] = ids
    in_order = replace(scattered, block_tables=tables)
    figures = {
        "scattered": _attention_microseconds(scattered),
        "in_order": _attention_microseconds(in_order),
        "contiguous_sdpa": _sdpa_microseconds(shape, num_sequences, context_tokens),
    }
    ratio = figures["scattered"] / figures["in_order"]
    return {"model": model, "sequences": num_sequences, "context": context_tokens, **figures, "ratio": round(ratio, 3)}


def block_size_case(block_size: int) -> dict[str, Any]:
    batch = _decode_batch(LLAMA_8B, block_size, *BLOCK_SIZE_CASE)
    return {"block_size": block_size, "microseconds": _attention_microseconds(batch)}


def swap_case(num_tokens: int, block_size: int) -> dict[str, Any]:
    """Return milliseconds out and in, for scattered blocks and for the same bytes in one copy."""
    num_blocks = num_tokens // block_size
    shape = (2 * num_blocks + 1, NUM_LAYERS, 2, LLAMA_8B.num_kv_heads, block_size, LLAMA_8B.head_dim)
    device = torch.zeros(shape, dtype=DTYPE, device="cuda")
    host = torch.zeros(shape, dtype=DTYPE, pin_memory=True)
    copies = [BlockCopy(2 * index + 1, 2 * index + 1) for index in range(num_blocks)]
    ways = {"pieces": _copy_pieces, "blocks": _copy_blocks}
    figures: dict[str, Any] = {"tokens": num_tokens, "block_size": block_size}
    for name, copy in ways.items():
        figures[f"{name}_out_ms"] = _wall_milliseconds(lambda copy=copy: copy(device, host, copies))
        figures[f"{name}_in_ms"] = _wall_milliseconds(lambda copy=copy: copy(host, device, copies))
    pool = CudaHostPool(device, host)
    figures["host_pool_out_ms"] = _wall_milliseconds(lambda: pool.transfer(Moves(swap_out=copies), 0))
    figures["host_pool_in_ms"] = _wall_milliseconds(lambda: pool.transfer(Moves(swap_in=copies), 0))
    num_bytes = num_blocks * device[0].numel() * DTYPE.itemsize
    figures["one_copy_out_ms"] = _wall_milliseconds(lambda: _copy_bytes(device, host, num_bytes))
    figures["one_copy_in_ms"] = _wall_milliseconds(lambda: _copy_bytes(host, device, num_bytes))
    return figures


def _copy_pieces(source: Tensor, target: Tensor, copies: list[BlockCopy]) -> None:
    for copy in copies:
        for layer in range(NUM_LAYERS):
            for half in range(2):
                piece = source[copy.source_block_id, layer, half]
                target[copy.target_block_id, layer, half].copy_(piece, non_blocking=True)


def _copy_blocks(source: Tensor, target: Tensor, copies: list[BlockCopy]) -> None:
    for copy in copies:
        target[copy.target_block_id].copy_(source[copy.source_block_id], non_blocking=True)


def _copy_bytes(source: Tensor, target: Tensor, num_bytes: int) -> None:
    flat = [tensor.view(torch.uint8).view(-1)[:num_bytes] for tensor in (source, target)]
    flat[1].copy_(flat[0], non_blocking=True)


def _decode_batch(shape: HeadShape, block_size: int, num_sequences: int, context_tokens: int) -> AttentionBatch:
    generator = torch.Generator("cuda").manual_seed(0)
    return attention_batch(shape, block_size, [(context_tokens - 1, 1)] * num_sequences, DTYPE, generator)


def _attention_microseconds(batch: AttentionBatch) -> float:
    return _graph_microseconds(lambda: paged_attention(**vars(batch)))


def _sdpa_microseconds(shape: HeadShape, num_sequences: int, context_tokens: int) -> float:
    query = torch.randn(num_sequences, shape.num_heads, 1, shape.head_dim, dtype=DTYPE, device="cuda")
    key, value = (
        torch.randn(num_sequences, shape.num_kv_heads, context_tokens, shape.head_dim, dtype=DTYPE, device="cuda")
        for _ in range(2)
    )
    attend = torch.nn.functional.scaled_dot_product_attention
    return _graph_microseconds(lambda: attend(query, key, value, enable_gqa=shape.num_heads != shape.num_kv_heads))


def _graph_microseconds(call: Callable[[], Any]) -> float:
    return round(float(do_bench_cudagraph(call, rep=20, return_mode="median")) * 1e3, 2)


def _wall_milliseconds(call: Callable[[], None]) -> float:
    seconds = []
    for _ in range(REPEATS + 1):
        torch.cuda.synchronize()
        started = time.perf_counter()
        call()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return round(statistics.median(seconds[1:]) * 1e3, 3)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
