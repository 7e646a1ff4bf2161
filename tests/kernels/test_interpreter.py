"""Runs each file of interpreted/ in a process of its own with TRITON_INTERPRET=1: the Triton kernels on CPU tensors."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted((Path(__file__).parent / "interpreted").glob("test_*.py"))


def run(file: Path) -> subprocess.CompletedProcess[str]:
    # The interpreter's tl.dot is numpy's matmul. With OpenBLAS's kernels for AVX2 (Haswell, Zen) the order of its sums
    # depends on the number of rows, so bits would differ that do not on a GPU; with those for AVX it does not.
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_CORETYPE": "Sandybridge"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(file)]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="this process runs interpreted/ itself")
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_kernels_in_the_interpreter(file: Path) -> None:
    finished = run(file)
    assert finished.returncode == 0, finished.stdout + finished.stderr
