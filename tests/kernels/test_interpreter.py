"""Run the tests in interpreted/ in a process with TRITON_INTERPRET=1: the Triton kernels on CPU tensors."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
INTERPRETED = Path(__file__).parent / "interpreted"
END_SECONDS = 2400  # 50 CPU seconds; one process, since each takes 5 to start


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="this process runs interpreted/ itself")
@pytest.mark.timeout(END_SECONDS)
def test_interpreted_kernel_tests_pass() -> None:
    # The interpreter's tl.dot is numpy's matmul. With OpenBLAS's AVX2 kernels (Haswell, Zen) the order of its sums
    # depends on the number of rows, which changes bits that a GPU does not change; its AVX kernels do not.
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_CORETYPE": "Sandybridge"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(INTERPRETED)]
    command += ["-o", f"timeout={END_SECONDS}"]  # a test of 15 CPU seconds on a busy machine
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
