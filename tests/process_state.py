"""State of the whole process that one test could leave to another: each file of tests ends with what it began with.

Which files share a process, and in which order, is another matter on every machine: what passes here by a variable that
an earlier file left fails there. Only what our own code and tests change is looked at: libraries set variables and
loggers of their own when they are first imported. Knows no test; conftest.py looks behind the last one of each file.
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
    """Name -> value: variables of the environment, signal handlers, levels of loggers, what gc and sockets are told."""
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
    """Return what is no longer as it was, a line each."""
    names = sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
    return [f"{name}: {before.get(name)!r} -> {now.get(name)!r}" for name in names]


class FileWatch:
    """A watch on the process: it names what the file whose tests run now has changed for good."""

    def __init__(self) -> None:
        self._file: Path | None = None
        self._before: State = {}

    def begins(self, test_file: Path) -> None:
        """Called before each test that runs; the first one of a file counts."""
        if self._file != test_file:
            self._file, self._before = test_file, process_state()

    def ends(self, test_file: Path) -> list[str]:
        """Return what the file has left, a line each. One whose tests were all skipped never began."""
        return left_behind(self._before, process_state()) if self._file == test_file else []


def _is_in_a_group() -> bool:
    """Whether this process has joined ranks; it can join one group at a time."""
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_available() and distributed.is_initialized()


def _handler(number: signal.Signals) -> object:
    """None for those that Python and a shell set: an event loop leaves Python's in the place of the shell's."""
    handler = signal.getsignal(number)
    return handler if callable(handler) and handler is not signal.default_int_handler else None
