"""Runs the files of interpreted/ in processes with TRITON_INTERPRET=1: the Triton kernels on CPU tensors."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
INTERPRETED = Path(__file__).parent / "interpreted"
END_SECONDS = 1200  # 25 CPU seconds each
# Two halves of one length: a process more takes 5 CPU seconds to begin.
ATTENTION = ("test_paged_attention", "test_paged_attention_shares", "test_score_rules")
FILES = {
    "attention": [INTERPRETED / f"{name}.py" for name in ATTENTION],
    "the others": sorted(file for file in INTERPRETED.glob("test_*.py") if file.stem not in ATTENTION),
}


def run(files: list[Path]) -> subprocess.CompletedProcess[str]:
    # The interpreter's tl.dot is numpy's matmul. With OpenBLAS's kernels for AVX2 (Haswell, Zen) the order of its sums
    # depends on the number of rows, so bits would differ that do not on a GPU; with those for AVX it does not.
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_CORETYPE": "Sandybridge"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *map(str, files)]
    command += ["-o", f"timeout={END_SECONDS}"]  # a test of 15 CPU seconds takes as long as the machine lets it
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="this process runs interpreted/ itself")
@pytest.mark.timeout(END_SECONDS)
@pytest.mark.parametrize("name", FILES)
def test_kernels_in_the_interpreter(name: str) -> None:
    finished = run(FILES[name])
    assert finished.returncode == 0, finished.stdout + finished.stderr
