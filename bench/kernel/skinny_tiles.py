"""Find the fastest skinny_linear tiles for the linear layers of a model, or of one of its ranks.

    python -m bench skinny-tiles --out DIR [--model NAME] [--tensor-parallel-size N]

Every layer of linear_shapes.py is timed in a CUDA graph over copies of its weight that exceed the L2 cache, against
cuBLAS and the rule of kernels/skinny_linear_tiles.py. Writes DIR/skinny_tiles_MODEL_tpN.json.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from torch.nn.functional import linear

from bench.kernel.graph_time import graph_microseconds
from bench.kernel.linear_shapes import MODELS, linear_shapes_of
from kernels.silu_and_mul import silu_and_mul
from kernels.skinny_linear import Tiles, gated_skinny_linear, skinny_linear

ROWS = (1, 8, 16, 32, 64, 128)
BYTES_OF_COPIES = 400 * 2**20  # eight times the L2 cache of an H200
SHARED_BYTES, MIN_STAGES = 225 * 1024, 3  # as in skinny_linear.py; fewer stages would not prefetch


def candidates(rows: int, num_outputs: int, num_inputs: int, is_gated: bool) -> Iterator[Tiles]:
    for block_n in (128,) if is_gated else (64, 128):
        for block_k in (64, 128, 256):
            for row_blocks in (1, 2) if rows >= 16 else (1,):
                stage_bytes = (block_n + max(8, rows // row_blocks)) * block_k * 2
                divides = num_outputs % 64 == 0 and num_outputs % (block_n // (1 + is_gated)) == 0
                if divides and num_inputs % block_k == 0 and MIN_STAGES * stage_bytes <= SHARED_BYTES:
                    yield Tiles(block_n, block_k, row_blocks=row_blocks)


def linear_of_worker(name: str, x: Tensor, weight: Tensor, tiles: Tiles | None) -> Tensor:
    """Compute the layer as a worker would with `tiles`, or with the library."""
    if name == "gate_up":
        return gated_skinny_linear(x, weight, tiles) if tiles else silu_and_mul(linear(x, weight))
    if name == "head":
        logits = x.new_empty(len(x), len(weight), dtype=torch.float32)
        if tiles:
            return skinny_linear(x, weight, tiles, logits)
        return torch.mm(x, weight.T, out_dtype=torch.float32, out=logits)
    return skinny_linear(x, weight, tiles) if tiles else linear(x, weight)


def measure(name: str, num_rows: int, weights: list[Tensor]) -> dict[str, Any]:
    num_outputs, num_inputs = weights[0].shape
    x = torch.randn(num_rows, num_inputs, device="cuda", dtype=torch.bfloat16)
    is_gated = name == "gate_up"

    def time_of(tiles: Tiles | None) -> float:
        return graph_microseconds([partial(linear_of_worker, name, x, weight, tiles) for weight in weights])

    found = {
        tiles: time_of(tiles) for tiles in candidates(num_rows, num_outputs // (1 + is_gated), num_inputs, is_gated)
    }
    best = min(found, key=found.__getitem__)
    return {
        "product": name,
        "outputs": num_outputs // (1 + is_gated),
        "inputs": num_inputs,
        "rows": num_rows,
        "cublas_microseconds": time_of(None),
        "tiles_microseconds": found[best],
        "tiles": asdict(best),
    }


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", metavar="PATH", type=Path, required=True, help="folder for the result")
    parser.add_argument("--model", choices=MODELS, default="Llama-3.1-8B")
    parser.add_argument("--tensor-parallel-size", type=int, choices=(1, 2, 4, 8), default=1)
    options = parser.parse_args(argv)
    results = []
    shapes = linear_shapes_of(MODELS[options.model], options.tensor_parallel_size)
    for name, (num_outputs, num_inputs, is_gated) in shapes.items():
        shape = (num_outputs * (1 + is_gated), num_inputs)
        num_copies = max(2, BYTES_OF_COPIES // (2 * shape[0] * shape[1]))
        weights = [torch.randn(shape, device="cuda", dtype=torch.bfloat16).mul_(0.02) for _ in range(num_copies)]
        for num_rows in ROWS:
            row = measure(name, num_rows, weights)
            results.append(row)
            ours, theirs = row["tiles_microseconds"], row["cublas_microseconds"]
            print(f"{name:8} {shape} {num_rows:4} rows: cuBLAS {theirs:7.1f} us, {ours:7.1f} with {row['tiles']}")
        del weights
    result = {
        "device": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "triton": triton.__version__},
        "command": " ".join(("python -m bench skinny-tiles", *argv)),
        "products": results,
    }
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"skinny_tiles_{options.model}_tp{options.tensor_parallel_size}.json"
    path.write_text(json.dumps(result, indent=1))
    return 0
