"""Time a layer of experts beside the time of reading the weights of the experts that it uses.

    python -m bench experts --out DIR [--rows N ...]

A layer is router, sort, both products and weighted sum, in a CUDA graph over several layers and inputs, whose weights
exceed the L2 cache. The limit is bytes / read ceiling, with the bytes of the distinct experts that the router reached;
the read ceiling is measured in the same run. Writes DIR/experts.json.
"""

import argparse
import statistics
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.kernel.device_ceilings import measure_ceilings
from bench.kernel.expert_layers import MODELS, ExpertLayer, ExpertModel, random_layer
from bench.kernel.graph_time import graph_microseconds
from bench.kernel.report import write_report
from kernels.moe.routing import Routing

ROWS = (1, 8, 32, 256, 2048)
NUM_LAYERS = {"bf16": 2, "fp8": 3, "mxfp4": 4, "int4": 4, "awq": 4}
MIN_CALLS = 8  # at few rows, so that the median covers several sets of experts


def measure(model: ExpertModel, layers: list[ExpertLayer], num_rows: int, read_ceiling: float) -> dict[str, Any]:
    """Return the times of one layer with `num_rows` random rows."""
    generator = torch.Generator(device="cuda").manual_seed(num_rows)
    num_inputs = max(1, MIN_CALLS // len(layers)) if num_rows <= 32 else 1
    inputs = [
        torch.randn(num_rows, model.hidden, device="cuda", dtype=torch.bfloat16, generator=generator)
        for _ in range(num_inputs)
    ]
    work = [(layer, x, layer.route(x)) for x in inputs for layer in layers]
    distinct = statistics.mean(int((routing.offsets.diff() > 0).sum()) for _, _, routing in work)
    seconds = graph_microseconds([partial(_run, layer, x) for layer, x, _ in work]) / 1e6
    limit = distinct * model.bytes_per_expert / read_ceiling
    return {
        "rows": num_rows,
        "distinct_experts": distinct,
        "seconds": seconds,
        "route_seconds": graph_microseconds([partial(layer.route, x) for layer, x, _ in work]) / 1e6,
        "apply_seconds": graph_microseconds([partial(_apply, *item) for item in work]) / 1e6,
        "limit_seconds": limit,
        "ceiling_ratio": limit / seconds,
    }


def _run(layer: ExpertLayer, x: Tensor) -> Tensor:
    return layer.apply(x, layer.route(x))


def _apply(layer: ExpertLayer, x: Tensor, routing: Routing) -> Tensor:
    return layer.apply(x, routing)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench experts", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", metavar="PATH", type=Path, required=True, help="folder of experts.json")
    parser.add_argument("--rows", metavar="N", type=int, nargs="+", default=ROWS, help="rows (default: %(default)s)")
    options = parser.parse_args(argv)
    ceilings = measure_ceilings()
    print(f"read ceiling {ceilings.read_bytes_per_second / 1e12:.2f} TB/s")
    print(f"{'layer':20s} {'rows':>5s} {'experts':>8s} {'us':>8s} {'route':>6s} {'limit':>8s} {'ratio':>6s}")
    results = []
    for name, model in MODELS.items():
        generator = torch.Generator(device="cuda").manual_seed(0)
        layers = [random_layer(model, generator) for _ in range(NUM_LAYERS[model.format])]
        for num_rows in options.rows:
            row = {"model": name} | measure(model, layers, num_rows, ceilings.read_bytes_per_second)
            results.append(row)
            times = [f"{row[key] * 1e6:{width}.1f}" for key, width in TIMES.items()]
            ratio = f"{row['ceiling_ratio']:6.2f}"
            print(f"{name:20s} {num_rows:5d} {row['distinct_experts']:8.1f}", *times, ratio, flush=True)
        del layers
        torch.cuda.empty_cache()
    write_report(options.out, "experts", argv, ceilings, results)
    return 0


TIMES = {"seconds": 8, "route_seconds": 6, "limit_seconds": 8}  # printed, with their widths
