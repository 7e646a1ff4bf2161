"""Measure kernels as fractions of the device's ceilings, in one run.

    python -m bench kernels --out DIR

Attention (attention.py) and linear layers (linear.py) have Llama-3.1-8B's shape in bf16, in a CUDA graph over several
layers. The floor of a call is the larger of bytes / read ceiling and operations / matmul ceiling; `ceiling_ratio` is
the floor over the time. FlashAttention 3 times with blocks of 16 are from another H200. Writes DIR/kernels.json.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from bench.kernel.attention import DECODE, PREFILL, time_case
from bench.kernel.device_ceilings import Ceilings, measure_ceilings
from bench.kernel.graph_time import graph_microseconds
from bench.kernel.linear import LAYER, SHAPES, Layers
from bench.kernel.report import write_report

PREFILL_CASES = ("prefill 8192", "prefill 32768", "mixed 64 x 1024 + 2048 new")
LINEAR_ROWS = (1, 16, 32, 64, 256)
FA3_MICROSECONDS = {
    "decode 1 x 1024": 10.6,
    "decode 16 x 1024": 26.3,
    "decode 64 x 1024": 76.1,
    "decode 256 x 1024": 279.0,
    "decode 1 x 8192": 19.1,
    "decode 16 x 8192": 131.0,
    "decode 64 x 8192": 478.0,
    "decode 256 x 8192": 1882.0,
}
Row = dict[str, Any]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench kernels", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", metavar="PATH", type=Path, required=True, help="folder of kernels.json")
    options = parser.parse_args(argv)
    ceilings = measure_ceilings()
    print(table(ceilings, []), flush=True)
    rows: list[Row] = []
    for measured in (attention, linear_layers):
        rows += [with_ratio(row, ceilings) for row in measured()]
        torch.cuda.empty_cache()
    print(table(ceilings, rows))
    write_report(options.out, "kernels", argv, ceilings, rows)
    return 0


def attention() -> Iterator[Row]:
    for name in (*DECODE, *PREFILL_CASES):
        timed = time_case(name, DECODE.get(name) or PREFILL[name])
        seconds = timed["microseconds"] / 1e6
        flops = timed["teraflops_per_second"] * seconds * 1e12
        group = f"{name.partition(' ')[0]} attention"
        row = {"group": group, "case": name, "seconds": seconds, "bytes": timed["read_bytes"], "flops": flops}
        yield row | ({"fa3_seconds": FA3_MICROSECONDS[name] / 1e6} if name in FA3_MICROSECONDS else {})
        torch.cuda.empty_cache()


def linear_layers() -> Iterator[Row]:
    layers = Layers()
    for name in (*SHAPES, "chain of a layer"):
        shapes = LAYER if name not in SHAPES else (name,)
        weight_elements = sum(SHAPES[shape][0] * SHAPES[shape][1] for shape in shapes)
        for rows in LINEAR_ROWS:
            calls = layers.calls(name, rows) if name in SHAPES else layers.chains(rows)
            yield {
                "group": "linear",
                "case": f"{name}, {rows} rows",
                "seconds": graph_microseconds(calls["served"]) / 1e6,
                "cublas_seconds": graph_microseconds(calls["cublas"]) / 1e6,
                "bytes": 2 * weight_elements,
                "flops": 2 * rows * weight_elements,
            }


def with_ratio(row: Row, ceilings: Ceilings) -> Row:
    floor = max(row["bytes"] / ceilings.read_bytes_per_second, row["flops"] / ceilings.matmul_flops_per_second)
    return {**row, "ceiling_ratio": floor / row["seconds"]}


def table(ceilings: Ceilings, rows: list[Row]) -> str:
    copy, read, matmul = (value / 1e12 for value in vars(ceilings).values())
    lines = [
        f"ceilings: copy {copy:.2f} TB/s, read {read:.2f} TB/s, matmul {matmul:.0f} TFLOP/s",
        f"{'group':18} {'case':28} {'us':>9} {'TB/s':>6} {'TFLOP/s':>8} {'of ceiling':>10} {'FA3, cuBLAS us':>15}",
    ]
    for row in rows:
        seconds, other = row["seconds"], row.get("cublas_seconds", row.get("fa3_seconds"))
        beside = f"{other * 1e6:15.1f}" if other else ""
        lines.append(
            f"{row['group']:18} {row['case']:28} {seconds * 1e6:9.1f} {row['bytes'] / seconds / 1e12:6.2f} "
            f"{row['flops'] / seconds / 1e12:8.1f} {row['ceiling_ratio']:10.2f} {beside}"
        )
    return "\n".join(lines)
