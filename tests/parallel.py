"""The distribution of the suite over pytest-xdist processes (`make test`).

A file stays on one process, because fixtures of a module are servers and models. So does a folder whose tests share a
server or a compiled library. Long files start first, so that no process ends with one while the others idle.
"""

import os
from collections.abc import MutableMapping
from pathlib import PurePosixPath

import pytest
from xdist.scheduler import LoadScopeScheduling

# Real models and clients, kills, and restarts first; tests without processes fill the rest.
LONGEST_FIRST = (
    "tests/clients",
    "tests/e2e",
    "tests/faults",
    "tests/engine_worker/execution",
    "tests/kernels",
    "tests/packaging",
    "tests/monitoring",
    "tests/bench",
    "tests/browser",
    "tests/integration",
    "tests/engine_worker/model",
    "tests/pagestream",
    "tests/engine_worker/scheduling",
    "tests/gateway/test_openapi.py",
    "tests/gateway/test_reader_process.py",
    "tests/deploy",
    "tests/gateway/batches",
    "tests/shared/test_messages.py",
    "tests/test_architecture.py",
    "tests/docs",
)
WHOLE_FOLDERS = ("tests/browser", "tests/clients", "tests/kernels/cpu")


def num_processes(selected: str, num_cores: int) -> int:
    """Return the number of pytest processes for the tests of `selected`, the expression of -m.

    It is one more than cores if tests wait: kills, restarts, and time-outs leave a core idle a third of the time. Tests
    without processes never wait, and collecting them in one more process would cost more than it gains.
    """
    return num_cores if selected in ("quick", "unit") else num_cores + 1


def share_cores(environ: MutableMapping[str, str] = os.environ) -> None:
    """Limit the threads of one of several pytest processes, and of its children, to its share of the cores.

    OpenMP threads spin while they wait: two pools on the same cores, or one on a busy machine, take many times as long
    (test_exactness: 450 instead of 80 CPU seconds), so they sleep instead. Call before torch and numpy are imported.
    """
    environ.setdefault("OMP_WAIT_POLICY", "passive")
    if num_processes := int(environ.get("PYTEST_XDIST_WORKER_COUNT", "0")):
        environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // num_processes)))


def together(nodeid: str) -> str:
    """Return the file or folder that one process runs together with this test."""
    file = nodeid.partition("::")[0]
    return next((folder for folder in WHOLE_FOLDERS if file.startswith(f"{folder}/")), file)


def turn(nodeid: str) -> int:
    """Return the position of a test in the order; smaller ones start earlier."""
    file = PurePosixPath(nodeid.partition("::")[0])
    named = (place for place, first in enumerate(LONGEST_FIRST) if file.is_relative_to(first))
    return next(named, len(LONGEST_FIRST))


class WholeFiles(LoadScopeScheduling):  # type: ignore[misc]
    """Schedule of pytest-xdist by scopes, in the order of collection."""

    def _split_scope(self, nodeid: str) -> str:
        return together(nodeid)


def make_schedule(config: pytest.Config, log: object) -> WholeFiles:
    config.option.loadscopereorder = False  # otherwise files with many tests come first, which are the fastest
    return WholeFiles(config, log)
