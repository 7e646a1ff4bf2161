"""A child process and its parent's end, and a child that is stopped. Linux only where the kernel is asked. It is used
at the start of a program that `serve` started and by who watches its children, and knows nothing of supervision."""

import ctypes
import os
import signal
import sys
from contextlib import suppress

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
# Who watches a child asks is_stopped() so often, and acts on so many in a row: one that is over in a second passes.
LOOK_SECONDS = 0.25
STOPPED_LOOKS = 4


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


def is_stopped(pid: int) -> bool:
    """Whether a signal (SIGSTOP, SIGTSTP) has stopped a child of this process, and none has continued it.

    By the kernel's own account, so a busy machine or a long call is never taken for it. Nothing is consumed: waiting
    for the child's end is as it was. False where it has ended, and of who is no child.
    """
    with suppress(ChildProcessError):
        return os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None
    return False
