"""How several processes of pytest-xdist share the suite (`make test`). Knows no test; knows which folders take long.

A file stays whole, because its module's fixtures are servers and models; so does a folder whose tests share one server,
or a library that is compiled for them.
What takes longest begins first, so that no process ends with a long file while the others idle.
"""

import os
from collections.abc import MutableMapping
from pathlib import PurePosixPath

import pytest
from xdist.scheduler import LoadScopeScheduling

# Real models and clients, kills and restarts first; tests of a single process fill what is left. A file of minutes
# begins before its folder's turn.
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
    """The pytest processes that run the tests which `selected`, the expression of -m, wants.

    One more than cores where tests wait: kills, restarts and time-outs leave a core idle for a third of their time.
    Those of a single process never wait, and another collection of them would cost more than it gives.
    """
    return num_cores if selected in ("quick", "unit") else num_cores + 1


def share_cores(environ: MutableMapping[str, str] = os.environ) -> None:
    """One of several pytest processes: its threads, and those of what it starts, are its share of the cores.

    Threads of OpenMP spin while they wait for each other: two pools on the same cores take many times as long as one,
    and one pool on a busy machine does too (test_exactness: 450 CPU seconds where it needs 80), so they sleep instead.
    Must be called before torch and numpy are imported.
    """
    environ.setdefault("OMP_WAIT_POLICY", "passive")
    if num_processes := int(environ.get("PYTEST_XDIST_WORKER_COUNT", "0")):
        environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // num_processes)))


def together(nodeid: str) -> str:
    """Return the name of what one process runs with this test: a file, or a folder of files."""
    file = nodeid.partition("::")[0]
    return next((folder for folder in WHOLE_FOLDERS if file.startswith(f"{folder}/")), file)


def turn(nodeid: str) -> int:
    """Smaller ones begin earlier."""
    file = PurePosixPath(nodeid.partition("::")[0])
    named = (place for place, first in enumerate(LONGEST_FIRST) if file.is_relative_to(first))
    return next(named, len(LONGEST_FIRST))


class WholeFiles(LoadScopeScheduling):  # type: ignore[misc]
    """pytest-xdist's own schedule of scopes, in the order of the collection."""

    def _split_scope(self, nodeid: str) -> str:
        return together(nodeid)


def make_schedule(config: pytest.Config, log: object) -> WholeFiles:
    config.option.loadscopereorder = False  # otherwise those with the most tests come first: they are the quickest
    return WholeFiles(config, log)
