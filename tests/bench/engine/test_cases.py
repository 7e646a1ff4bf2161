"""Run the commands of bench/engine/cases.py from their flags to their output file, on a small model."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.engine.cases import main
from tests.engine_worker.execution.reference import write_model


@pytest.mark.usefixtures("garbage_as_before")
def test_command_writes_its_figures(tmp_path: Path) -> None:
    model, trace = write_model(tmp_path / "model"), tmp_path / "trace.json"
    trace.write_text(json.dumps([[9, 4], [20, 8], [3, 2]]))
    options = ["--trace", str(trace), "--sections", "trace", "--repeats", "1", "--token-ids", "3:60"]
    worker_flags = ["--model", str(model), "--device", "cpu", "--max-model-len", "128", "--kv-cache-memory-bytes", "4M"]
    assert main([*options, "--out", str(tmp_path), "--", *worker_flags]) == 0
    rows = [json.loads(line) for line in (tmp_path / "pagestream.jsonl").read_text().splitlines()]
    assert [row["what"] for row in rows[:2]] == ["origin", "engine_start"] and rows[1]["kv_bytes"] > 0
    assert [phase for phase, _ in rows[1]["phases_s"]["0"]][1:] == ["torch", "weights", "allocate_kv", "warmup"]
    assert {"requests": 3, "prompt_tokens": 32, "output_tokens": 14}.items() <= rows[2].items()


def test_torch_is_imported_where_a_worker_imports_it() -> None:
    """Torch is imported after the followers have started."""
    program = (
        "import sys, bench.engine.cases, bench.engine.sections, engine_worker.__main__; print('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, check=True).stdout == b"False\n"
