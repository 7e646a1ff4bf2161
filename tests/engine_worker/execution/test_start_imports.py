"""A CPU worker imports no compiler at start: those take longer than all other imports, and Triton is not installed."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine_worker.model.families import write_family
from tests.engine_worker.model.family_cases import NATIVE

COMPILERS = ("torch._dynamo", "torch._inductor", "sympy", "triton")
START = """
import sys
from pathlib import Path
from engine_worker.__main__ import load_engine
from engine_worker.execution.settings import ExecutionSettings
from engine_worker.scheduling.settings import SchedulingSettings
from engine_worker.settings import WorkerSettings
execution = ExecutionSettings(model=Path(sys.argv[1]), device="cpu", max_model_len=64, kv_cache_memory_bytes=2**20)
load_engine(WorkerSettings(execution=execution, scheduling=SchedulingSettings()), lambda phase, progress, detail: None)
print([name for name in sys.argv[2:] if name in sys.modules])
"""


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "qwen3_next"])
def test_cpu_start_imports_no_compiler(tmp_path: Path, family: str) -> None:
    directory = write_family(tmp_path, NATIVE[family])
    command = [sys.executable, "-c", START, str(directory), *COMPILERS]
    assert subprocess.run(command, capture_output=True, text=True, check=True, timeout=110).stdout.strip() == "[]"
