"""Tie a child process to the life of its parent, and detect stopped children. exit_with_parent() needs Linux."""

import ctypes
import os
import signal
import sys
from contextlib import suppress

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
# Interval of is_stopped(), and number of results in a row before a watcher acts. A stop of less than 1 s is ignored.
LOOK_SECONDS = 0.25
STOPPED_LOOKS = 4


class ParentGone(RuntimeError):
    """The parent ended before prctl() could take effect."""


def exit_with_parent(parent_pid: int, signal_number: int = signal.SIGTERM) -> None:
    """Let the kernel send this process `signal_number` when the parent's thread that started it ends.

    So no orphan remains even after a `kill -9` of the parent.

    Args:
        parent_pid: Result of getppid() at the start of this process; if it has changed, the parent has died.
        signal_number: The signal.

    Raises:
        RuntimeError: If the system is not Linux.
        OSError: If prctl() fails.
        ParentGone: If the parent has already ended.
    """
    if sys.platform != "linux":
        raise RuntimeError(f"--exit-with-parent: needs Linux (prctl); this is {sys.platform}")
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signal_number), 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl(PR_SET_PDEATHSIG): {os.strerror(error)}")
    if os.getppid() != parent_pid:
        raise ParentGone(f"parent {parent_pid} has ended")


def is_stopped(pid: int) -> bool:
    """Return whether a child of this process is stopped by a signal (SIGSTOP, SIGTSTP).

    The kernel's state is read, so a slow child does not count, and the child can still be waited for. Returns False if
    it has ended, or is not a child.
    """
    with suppress(ChildProcessError):
        return os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None
    return False
