"""Time the four linear layers of a Llama-3.1-8B layer with 4-bit weights beside the time of reading them.

    python -m bench w4 --out DIR [--rows N ...] [--group 32] [--minima]

The chain of a layer's four products runs in a CUDA graph over eight layers of distinct weights (0.9 GB), whose scales
cover 128 inputs; GGUF's Q4_1 and Q4_K have groups of 32 with minima. The limit is bytes / read ceiling, measured in the
same run; cuBLAS multiplies the same shapes in bfloat16. Writes DIR/w4.json.
"""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from bench.kernel.device_ceilings import measure_ceilings
from bench.kernel.graph_time import graph_microseconds
from bench.kernel.linear import HIDDEN, INTERMEDIATE, LAYER, NUM_LAYERS, SHAPES
from bench.kernel.report import write_report
from bench.kernel.w4_checks import random_weight
from engine_worker.model.quantization.int4_cuda import W4Linear
from engine_worker.model.specs.mlp import SILU
from kernels.silu_and_mul import silu_and_mul
from kernels.w4a16.weights import GROUPS, Offset

ROWS = (1, 8, 16, 32, 64, 128, 256, 1024, 4096)
Apply = Callable[[Tensor], Tensor]  # of a linear layer; that of gate and up includes the gate


def packed_layer(generator: torch.Generator, group: int, offset: Offset) -> tuple[dict[str, Apply], int]:
    """Return the four layers by name, and their bytes."""
    layers: dict[str, Apply] = {}
    num_bytes = 0
    for name in LAYER:
        is_gated = name == "gate_up"
        weight = random_weight(*SHAPES[name], group, generator, offset=offset, is_gated=is_gated)
        linear = W4Linear(weight, None, is_deterministic=False)
        layers[name] = partial(linear.gated, gate=SILU) if is_gated else linear
        num_bytes += weight.nbytes
    return layers, num_bytes


def cublas_layer(generator: torch.Generator) -> dict[str, Apply]:
    def layer(name: str) -> Apply:
        weight = torch.randn(SHAPES[name], dtype=torch.bfloat16, device=generator.device, generator=generator) * 0.02
        linear: Apply = partial(torch.nn.functional.linear, weight=weight)
        return (lambda x: silu_and_mul(linear(x))) if name == "gate_up" else linear

    return {name: layer(name) for name in LAYER}


def chain(layer: dict[str, Apply], x: Tensor) -> Tensor:
    layer["qkv"](x)
    return layer["down"](layer["gate_up"](layer["o"](x)))


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench w4", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", metavar="PATH", type=Path, required=True, help="folder of w4.json")
    parser.add_argument("--rows", metavar="N", type=int, nargs="+", default=ROWS, help="rows (default: %(default)s)")
    parser.add_argument("--group", metavar="N", type=int, choices=GROUPS, default=128, help="inputs per scale")
    parser.add_argument("--minima", action="store_true", help="each group has a minimum")
    options = parser.parse_args(argv)
    offset = Offset.MINIMUM if options.minima else Offset.NONE
    assert SHAPES["down"] == (HIDDEN, INTERMEDIATE), "the chain's sizes"
    ceilings = measure_ceilings()
    generator = torch.Generator(device="cuda").manual_seed(0)
    packed = [packed_layer(generator, options.group, offset) for _ in range(NUM_LAYERS)]
    dense = [cublas_layer(generator) for _ in range(NUM_LAYERS)]
    limit = packed[0][1] / ceilings.read_bytes_per_second * 1e6
    print(f"read ceiling {ceilings.read_bytes_per_second / 1e12:.2f} TB/s, limit {limit:.1f} us")
    print(f"{'rows':>5s} {'us':>8s} {'of limit':>8s} {'cuBLAS bf16':>12s} {'ratio':>6s}")
    results = []
    for num_rows in options.rows:
        x = torch.randn(num_rows, HIDDEN, dtype=torch.bfloat16, device="cuda", generator=generator)
        ours = graph_microseconds([partial(chain, layer, x) for layer, _ in packed])
        library = graph_microseconds([partial(chain, layer, x) for layer in dense])
        print(f"{num_rows:5d} {ours:8.1f} {limit / ours:8.3f} {library:12.1f} {library / ours:6.3f}", flush=True)
        results.append(
            {"rows": num_rows, "microseconds": ours, "limit_microseconds": limit, "cublas_microseconds": library}
        )
    write_report(options.out, "w4", argv, ceilings, results)
    return 0
