"""Measure the linear layers of models on one GPU: cuBLAS, the served kernel, and the memory floor.

    python -m bench linear --out DIR [--deterministic]

Every linear layer of Llama-3.1-8B is timed in a CUDA graph over eight layers of distinct weights (3.5 GB), alone and as
the chain of a layer's four; the served gated layer includes SiLU * up, cuBLAS's does not. Then follow the small
kernels, the numbers of rows whose bits differ from those among 1024 rows, and the layers of ten models, where both
sides include SiLU * up. Writes DIR/linear.json.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from torch.nn.functional import linear

from bench.kernel.graph_time import graph_microseconds
from bench.kernel.linear_shapes import Shape, all_shapes
from engine_worker.execution.load.load_replica import use_batch_invariant_products
from engine_worker.model.quantization.dense_cuda import CudaLinear
from engine_worker.model.specs.mlp import SILU
from kernels.rms_norm import add_rms_norm
from kernels.rotary_embedding import RotaryInput, rotate_and_store
from kernels.silu_and_mul import silu_and_mul

READ_CEILING_BYTES_PER_SECOND = 4.62e12  # measured on an H200: reads only
NUM_LAYERS = 8
HIDDEN, INTERMEDIATE, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, VOCAB = 4096, 14336, 32, 8, 128, 49152
# name: rows of the weight, inputs
SHAPES = {
    "qkv": ((NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM, HIDDEN),
    "o": (HIDDEN, HIDDEN),
    "gate_up": (2 * INTERMEDIATE, HIDDEN),
    "down": (HIDDEN, INTERMEDIATE),
    "head": (VOCAB, HIDDEN),
}
LAYER = ("qkv", "o", "gate_up", "down")
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
MODELS_ROWS = (1, 16, 64, 128)
BYTES_OF_COPIES = 400e6  # of a weight in a graph: eight times the L2 cache of an H200
INVARIANCE_ROWS = (1, 2, 3, 5, 8, 15, 16, 17, 24, 31, 32, 48, 63, 64, 65, 96, 127, 128, 129, 200, 256, 257, 512, 513)

Calls = list[Callable[[], object]]


def served(x: Tensor, weight: Tensor, is_gated: bool) -> Tensor:
    """Compute the layer as a worker does, with whichever kernel it selects."""
    layer = CudaLinear(weight)
    return layer.gated(x, SILU) if is_gated else layer(x)


class Layers:
    def __init__(self) -> None:
        self.generator = torch.Generator(device="cuda").manual_seed(0)
        self.weights = {
            name: [self.random(rows, inputs) * 0.02 for _ in range(NUM_LAYERS if name in LAYER else 2)]
            for name, (rows, inputs) in SHAPES.items()
        }
        self.inputs = {inputs: self.random(1024, inputs) for inputs in (HIDDEN, INTERMEDIATE)}

    def random(self, *size: int) -> Tensor:
        return torch.randn(size, device="cuda", dtype=torch.bfloat16, generator=self.generator)

    def calls(self, name: str, rows: int) -> dict[str, Calls]:
        x = self.inputs[SHAPES[name][1]][:rows]
        return {
            "cublas": [lambda w=w: linear(x, w) for w in self.weights[name]],
            "served": [lambda w=w: served(x, w, name == "gate_up") for w in self.weights[name]],
        }

    def chains(self, rows: int) -> dict[str, Calls]:
        x, wide = self.inputs[HIDDEN][:rows], self.inputs[INTERMEDIATE][:rows]

        def with_cublas(layer: int) -> None:
            linear(x, self.weights["qkv"][layer])
            hidden = linear(x, self.weights["o"][layer])
            linear(hidden, self.weights["gate_up"][layer])
            linear(wide, self.weights["down"][layer])

        def as_served(layer: int) -> None:
            served(x, self.weights["qkv"][layer], False)
            hidden = served(x, self.weights["o"][layer], False)
            served(served(hidden, self.weights["gate_up"][layer], True), self.weights["down"][layer], False)

        layers = range(NUM_LAYERS)
        return {
            "cublas": [lambda layer=layer: with_cublas(layer) for layer in layers],
            "served": [lambda layer=layer: as_served(layer) for layer in layers],
        }

    def other_bits(self, name: str) -> list[int]:
        """Return the numbers of rows for which a row's bits differ from those among 1024."""
        weight, x, is_gated = self.weights[name][0], self.inputs[SHAPES[name][1]], name == "gate_up"
        expected = served(x, weight, is_gated)
        return [
            rows for rows in INVARIANCE_ROWS if not torch.equal(served(x[:rows], weight, is_gated), expected[:rows])
        ]


def measure_layers(layers: Layers) -> list[dict[str, Any]]:
    results = []
    for name in (*SHAPES, "chain"):
        weight_bytes = sum(layers.weights[key][0].nbytes for key in (LAYER if name == "chain" else (name,)))
        for rows in ROWS:
            calls = layers.chains(rows) if name == "chain" else layers.calls(name, rows)
            times = {f"{kind}_microseconds": graph_microseconds(calls[kind]) for kind in calls}
            floor = weight_bytes / READ_CEILING_BYTES_PER_SECOND * 1e6
            results.append({"product": name, "rows": rows, **times, "floor_microseconds": floor})
    return results


def measure_models() -> list[dict[str, Any]]:
    """Measure every layer of all models: served against cuBLAS, and bit equality between few and many rows."""
    return [row for shape, owners in all_shapes().items() for row in _measure_shape(shape, owners)]


def _measure_shape(shape: Shape, owners: list[str]) -> list[dict[str, Any]]:
    num_outputs, num_inputs, is_gated = shape
    generator = torch.Generator(device="cuda").manual_seed(0)

    def random(*size: int) -> Tensor:
        return torch.randn(size, device="cuda", dtype=torch.bfloat16, generator=generator)

    weight_bytes = num_outputs * (1 + is_gated) * num_inputs * 2
    num_layers = max(2, min(8, int(BYTES_OF_COPIES / weight_bytes) + 1))
    weights = [random(num_outputs * (1 + is_gated), num_inputs) * 0.02 for _ in range(num_layers)]
    x = random(1024, num_inputs)
    many = served(x, weights[0], is_gated)
    results = []
    for rows in MODELS_ROWS:
        few = x[:rows]
        library = [lambda w=w, few=few: silu_and_mul(linear(few, w)) if is_gated else linear(few, w) for w in weights]
        ours = [lambda w=w, few=few: served(few, w, is_gated) for w in weights]
        times = {"cublas_microseconds": graph_microseconds(library), "served_microseconds": graph_microseconds(ours)}
        results.append(
            {"outputs": num_outputs, "inputs": num_inputs, "gated": is_gated, "rows": rows, **times}
            | {"floor_microseconds": weight_bytes / READ_CEILING_BYTES_PER_SECOND * 1e6, "of": owners}
            | {"same_bits": torch.equal(served(few, weights[0], is_gated), many[:rows])}
        )
    return results


def print_models(results: list[dict[str, Any]]) -> None:
    for rows in MODELS_ROWS:
        of_rows = [row for row in results if row["rows"] == rows]
        ratios = {row["of"][0]: row["served_microseconds"] / row["cublas_microseconds"] for row in of_rows}
        worst = max(ratios, key=ratios.__getitem__)
        mean = sum(ratios.values()) / len(ratios)
        other = [row["of"][0] for row in of_rows if not row["same_bits"]]
        print(f"{len(ratios)} linear layers, {rows} rows: {mean:.3f} x cuBLAS, at most {ratios[worst]:.3f} ({worst})")
        print(f"  other bits than among 1024: {other}")


def measure_small_kernels(layers: Layers) -> list[dict[str, Any]]:
    results = []
    for rows in (1, 16, 64, 256, 512):
        x, weight = layers.random(rows, HIDDEN), layers.random(HIDDEN)
        qkv = layers.random(rows, NUM_HEADS + 2 * NUM_KV_HEADS, HEAD_DIM)
        pool = torch.zeros(1024, 2, NUM_KV_HEADS, 16, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
        positions, table = torch.arange(rows, device="cuda"), torch.rand(1024, HEAD_DIM, device="cuda")
        gate_up = layers.random(rows, 2 * INTERMEDIATE)
        rotation = RotaryInput(qkv, positions, table, pool[:, 0], pool[:, 1], positions)

        calls: dict[str, Callable[[], object]] = {
            "add_rms_norm": lambda x=x, weight=weight: add_rms_norm(x, x, weight, 1e-5),
            "rotate_and_store": lambda rotation=rotation: rotate_and_store(rotation),
            "silu_and_mul": lambda gate_up=gate_up: silu_and_mul(gate_up),
        }
        times = {f"{name}_microseconds": graph_microseconds([call] * 16) for name, call in calls.items()}
        results.append({"rows": rows, **times})
    return results


def print_table(layers: list[dict[str, Any]], small: list[dict[str, Any]], other_bits: dict[str, list[int]]) -> None:
    print(f"{'product':8s} {'rows':>5s} {'cuBLAS us':>10s} {'served us':>10s} {'floor us':>9s} {'TB/s':>5s}")
    for row in layers:
        ours, floor = row["served_microseconds"], row["floor_microseconds"]
        bandwidth = floor / ours * READ_CEILING_BYTES_PER_SECOND / 1e12
        times = f"{row['cublas_microseconds']:10.1f} {ours:10.1f} {floor:9.1f} {bandwidth:5.2f}"
        print(f"{row['product']:8s} {row['rows']:5d} {times}")
    for row in small:
        print(", ".join(f"{key.removesuffix('_microseconds')} {value:.1f}" for key, value in row.items()))
    print("rows with other bits than among 1024:", other_bits)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", metavar="PATH", type=Path, required=True, help="folder for linear.json")
    parser.add_argument("--deterministic", action="store_true", help="use the worker's --deterministic kernels")
    options = parser.parse_args(argv)
    if options.deterministic:
        use_batch_invariant_products()
    layers = Layers()
    timings, small = measure_layers(layers), measure_small_kernels(layers)
    other_bits = {name: layers.other_bits(name) for name in SHAPES}
    print_table(timings, small, other_bits)
    del layers
    models = measure_models()
    print_models(models)
    result = {
        "device": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "triton": triton.__version__},
        "command": "python -m bench linear --out DIR" + (" --deterministic" if options.deterministic else ""),
        "products": timings,
        "small_kernels": small,
        "rows_with_other_bits": other_bits,
        "models": models,
    }
    options.out.mkdir(parents=True, exist_ok=True)
    name = "linear_deterministic.json" if options.deterministic else "linear.json"
    (options.out / name).write_text(json.dumps(result, indent=1))
    return 0
