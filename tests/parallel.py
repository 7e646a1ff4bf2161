"""Distribute the suite over several pytest-xdist processes (`make test`).

A file stays whole, because its module fixtures are servers and models. So does a folder whose tests share a server or a
compiled library. Long files begin first, so that no process ends with one while the others idle.
"""

import os
from collections.abc import MutableMapping
from pathlib import PurePosixPath

import pytest
from xdist.scheduler import LoadScopeScheduling

# Tests with real models, clients, kills and restarts come first; short tests fill the rest. A file that takes minutes
# begins before its folder.
LONGEST_FIRST = (
    "tests/kernels/test_compile_sm90.py",
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
    "tests/gateway/test_work_process.py",
    "tests/deploy",
    "tests/gateway/batches",
    "tests/shared/test_messages.py",
    "tests/test_architecture.py",
    "tests/docs",
)
WHOLE_FOLDERS = ("tests/browser", "tests/clients", "tests/kernels/cpu")


def num_processes(selected: str, num_cores: int) -> int:
    """Return the number of pytest processes for `selected`, the expression of -m.

    It is one more than cores for tests that wait: kills, restarts and timeouts leave a core idle for a third of the
    time.
    Tests of a single process never wait, and another process would collect the suite once more.
    """
    return num_cores if selected in ("quick", "unit") else num_cores + 1


def share_cores(environ: MutableMapping[str, str] = os.environ) -> None:
    """Limit the threads of a pytest process, and of its children, to its share of the cores.

    OpenMP threads spin while they wait: two pools on the same cores, or one on a busy machine, take many times as long
    (test_exactness: 450 CPU seconds instead of 80), so they sleep instead. Call this before torch and numpy are
    imported.
    """
    environ.setdefault("OMP_WAIT_POLICY", "passive")
    if num_processes := int(environ.get("PYTEST_XDIST_WORKER_COUNT", "0")):
        environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // num_processes)))


def together(nodeid: str) -> str:
    """Return the group that one process runs together: a file, or a folder of files."""
    file = nodeid.partition("::")[0]
    return next((folder for folder in WHOLE_FOLDERS if file.startswith(f"{folder}/")), file)


def turn(nodeid: str) -> int:
    """Return the sort key; smaller ones begin earlier."""
    file = PurePosixPath(nodeid.partition("::")[0])
    named = (place for place, first in enumerate(LONGEST_FIRST) if file.is_relative_to(first))
    return next(named, len(LONGEST_FIRST))


class WholeFiles(LoadScopeScheduling):  # type: ignore[misc]
    """pytest-xdist's schedule of scopes, in collection order."""

    def _split_scope(self, nodeid: str) -> str:
        return together(nodeid)


def make_schedule(config: pytest.Config, log: object) -> WholeFiles:
    config.option.loadscopereorder = False  # by default, groups with the most tests come first, which are the fastest
    return WholeFiles(config, log)
