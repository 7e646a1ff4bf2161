"""Check that each test file leaves the process as it found it.

Which files share a process, and in which order, differs between machines: a test that passes because of a variable left
by an earlier file fails elsewhere. Only state that our code and tests change is checked; libraries set variables and
loggers when they are first imported.
"""

import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

State = Mapping[str, object]
_VARIABLES = ("CUDA_VISIBLE_DEVICES", "HOME", "LD_", "OMP_", "PAGESTREAM_", "PATH", "PYTHON", "TMPDIR", "XDG_")
_LOGGERS = ("root", "aiohttp.access", "asyncio", "gateway", "pagestream", "redis", "urllib3", "worker")
_OF_PYTEST_TIMEOUT = signal.SIGALRM


def process_state() -> State:
    """Return name -> value of environment variables, signal handlers, logger levels, and settings of gc and sockets."""
    return {
        **{f"os.environ[{name!r}]": value for name, value in os.environ.items() if name.startswith(_VARIABLES)},
        **{f"the handler of {number.name}": _handler(number) for number in set(signal.Signals) - {_OF_PYTEST_TIMEOUT}},
        **{f"the level of logger {name}": logging.getLogger(name).level for name in _LOGGERS},
        "logging.disable()": logging.root.manager.disable,
        "the working directory": os.getcwd(),
        "gc.isenabled()": gc.isenabled(),
        "gc.get_debug()": gc.get_debug(),
        "gc.get_threshold()": gc.get_threshold(),
        "socket.getdefaulttimeout()": socket.getdefaulttimeout(),
        "torch.distributed.is_initialized()": _is_in_a_group(),
    }


def left_behind(before: State, now: State) -> list[str]:
    """Return differences from the earlier state, one per line."""
    names = sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
    return [f"{name}: {before.get(name)!r} -> {now.get(name)!r}" for name in names]


class FileWatch:
    """Compares the process before and after the tests of a file."""

    def __init__(self) -> None:
        self._file: Path | None = None
        self._before: State = {}

    def begins(self, test_file: Path) -> None:
        """Note the state; called before each test, of which the first one of a file counts."""
        if self._file != test_file:
            self._file, self._before = test_file, process_state()

    def ends(self, test_file: Path) -> list[str]:
        """Return what the file has left, one entry per line; nothing if all its tests were skipped."""
        return left_behind(self._before, process_state()) if self._file == test_file else []


def _is_in_a_group() -> bool:
    """Return whether this process has joined a group of ranks; it can join one at a time."""
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_available() and distributed.is_initialized()


def _handler(number: signal.Signals) -> object:
    """Return None for handlers that Python or the shell sets: an event loop replaces the shell's with Python's."""
    handler = signal.getsignal(number)
    return handler if callable(handler) and handler is not signal.default_int_handler else None
