"""Simulate the paper's figures; each is written as JSON and PNG, with the paper's values beside ours."""

import argparse
import json
import platform
import sys
import time
from pathlib import Path
from typing import Any

from bench.paper import drawings, figures_device, figures_memory, figures_prefix, figures_sharing
from bench.provenance import commit

FIGURES = {
    "2": (figures_memory.figure_2, drawings.figure_2),
    "12": (figures_memory.figure_12, drawings.figure_12),
    "13": (figures_memory.figure_13, drawings.figure_13),
    "14": (figures_sharing.figure_14, drawings.figure_14),
    "15": (figures_sharing.figure_15, drawings.figure_15),
    "16": (figures_prefix.figure_16, drawings.figure_16),
    "17": (figures_prefix.figure_17, drawings.figure_17),
    "18": (figures_device.figure_18, drawings.figure_18),
    "19": (figures_device.figure_19, drawings.figure_19),
}


def main(argv: list[str]) -> int:
    options = _parser().parse_args(argv)
    options.output.mkdir(parents=True, exist_ok=True)
    for name in options.figures:
        compute, draw = FIGURES[name]
        started = time.perf_counter()
        data = compute(options.scale)
        path = options.output / f"figure_{name}.json"
        path.write_text(json.dumps(_header(argv, name) | data, indent=1) + "\n", encoding="utf-8")
        draw(data, path.with_suffix(".png"))
        print(f"figure {name}: {path} and .png, {time.perf_counter() - started:.0f} s", flush=True)
    return 0


def _header(argv: list[str], name: str) -> dict[str, Any]:
    return {
        "figure": name,
        "command": " ".join(["python -m bench.paper", *argv]),
        "commit": commit(),
        "python": platform.python_version(),
    }


def _figures(text: str) -> list[str]:
    names = text.split(",")
    if unknown := set(names) - FIGURES.keys():
        raise argparse.ArgumentTypeError(
            f"unknown figures: {', '.join(sorted(unknown))}; allowed: {', '.join(FIGURES)}"
        )
    return names


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.paper", description=__doc__.split("\n")[0])
    parser.add_argument(
        "--figures",
        metavar="NAME,NAME,...",
        type=_figures,
        default=list(FIGURES),
        help="figures, comma separated (default: all)",
    )
    parser.add_argument(
        "--scale",
        metavar="RATIO",
        type=float,
        default=1.0,
        help="factor of the simulated time; 0.1 for a quick look (default: %(default)s)",
    )
    parser.add_argument("--output", metavar="PATH", type=Path, default=Path("bench/results/paper"))
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
