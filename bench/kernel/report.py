"""The result file of a benchmark of kernels, with the device's ceilings of the same run."""

import json
from pathlib import Path
from typing import Any

import torch
import triton

from bench.kernel.device_ceilings import Ceilings
from bench.provenance import provenance


def write_report(out: Path, name: str, argv: list[str], ceilings: Ceilings, rows: list[dict[str, Any]]) -> None:
    """Write `rows` of `python -m bench NAME` to OUT/NAME.json, with provenance, versions and ceilings."""
    origin = provenance([name, *argv]) | {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
    }
    out.mkdir(parents=True, exist_ok=True)
    content = {**origin, "ceilings": vars(ceilings), name: rows}
    (out / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
