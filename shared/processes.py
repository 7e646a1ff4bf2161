"""A child process and its parent's end. Linux only where the kernel is asked. It is used
at the start of a program that `serve` started, and knows nothing of supervision."""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class ParentGone(RuntimeError):
    """The parent ended before the kernel could be asked to tell of it."""


def exit_with_parent(parent_pid: int, signal_number: int = signal.SIGTERM) -> None:
    """Have the kernel send this process `signal_number` when the thread of `parent_pid` that started it ends.

    So no orphan stays even after a `kill -9` of the parent, which can run no clean-up. `parent_pid` is what getppid()
    said when the process began: if it says something else once the kernel knows, the parent died in between.
    """
    if sys.platform != "linux":
        raise RuntimeError(f"exit with the parent: needs Linux's prctl, this is {sys.platform}")
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signal_number), 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl(PR_SET_PDEATHSIG): {os.strerror(error)}")
    if os.getppid() != parent_pid:
        raise ParentGone(f"parent {parent_pid} has ended")
