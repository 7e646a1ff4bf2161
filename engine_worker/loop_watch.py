"""`python -I -S loop_watch.py PID SECONDS`: end a process whose event loop hangs, from outside of its interpreter.

The worker writes a byte into this process's input with each tick; the end of the input ends this process. A tick counts
as missed only while the kernel lets the worker run: one that was stopped (SIGSTOP, a frozen container) missed nothing.
The worker gets SIGABRT, on which faulthandler writes its stacks, and later SIGKILL.
"""

import os
import select
import signal
import sys
from pathlib import Path

TICK_SECONDS = 1.0
LAST_TICKS = 5  # from SIGABRT to SIGKILL


def is_stopped(pid: int) -> bool:
    """Return whether the process is stopped, by a signal or by a debugger."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return False
    return state in ("T", "t")


def main(pid: int, timeout_ticks: int) -> None:
    """Watch process `pid` until its input ends."""
    num_missed = 0
    while num_missed < timeout_ticks + LAST_TICKS:
        ready, _, _ = select.select([sys.stdin], [], [], TICK_SECONDS)
        if ready:
            if not os.read(sys.stdin.fileno(), 4096):
                return
            num_missed = 0
        elif not is_stopped(pid):
            num_missed += 1
            if num_missed == timeout_ticks:
                sys.stderr.write(f"the event loop of process {pid} made no tick for {timeout_ticks} s: it ends\n")
                os.kill(pid, signal.SIGABRT)
    os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    main(int(sys.argv[1]), int(sys.argv[2]))
