"""A child with exit_with_parent() ends with its parent, even if the parent is killed."""

import signal
import subprocess
import sys

import psutil
import pytest

from tests.patience import PATIENCE_SECONDS

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="prctl exists only on Linux")

CHILD = """
import os, signal, sys
from shared.processes import exit_with_parent
exit_with_parent(os.getppid(), signal.SIGKILL)
print(os.getpid(), flush=True)
signal.pause()
"""
PARENT = """
import subprocess, sys, signal
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]])
signal.pause()
"""


def test_child_of_killed_parent_ends() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, CHILD], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    with parent.stdout:
        child = psutil.Process(int(parent.stdout.readline()))
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        child.wait(PATIENCE_SECONDS)
    assert not child.is_running()


def test_exit_with_parent_dead_parent_is_detected() -> None:
    program = "from shared.processes import *\ntry: exit_with_parent(1 << 30)\nexcept ParentGone: sys.exit(7)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 7
