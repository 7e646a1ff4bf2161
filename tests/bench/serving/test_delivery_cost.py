"""Run the delivery cost benchmark on a small fleet."""

import json
from pathlib import Path

from bench.serving.delivery_cost import main
from tests.own_processes import running


def test_every_process_is_measured_and_stopped(tmp_path: Path, demo_model_dir: Path) -> None:
    flags = ["--requests", "3", "--output-tokens", "4", "--step-seconds", "0.001", "--gateways", "2"]
    assert main(["--model", str(demo_model_dir), *flags, "--json", str(tmp_path / "cost.json")]) == 0
    one, four = json.loads((tmp_path / "cost.json").read_text())["runs"]
    assert (one["output_tokens"], four["output_tokens"]) == (3, 12)
    assert set(four["cpu_seconds"]) == {"gateway 0", "gateway 1", "worker", "store"}
    assert running("bench.serving.scripted_worker") == running("gateway") == []
