"""`python -I -S loop_watch.py PID SECONDS`: ends a process whose event loop hangs, from outside its interpreter.

The worker writes a byte to this process's stdin with each tick; EOF ends this process. A missed tick counts only while
the worker can run: a stopped process (SIGSTOP, a frozen container) misses none. The worker gets SIGABRT, at which
faulthandler writes its stacks, and SIGKILL 5 s later.
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
                sys.stderr.write(f"process {pid}: event loop made no tick for {timeout_ticks} s: ending it\n")
                os.kill(pid, signal.SIGABRT)
    os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    main(int(sys.argv[1]), int(sys.argv[2]))
