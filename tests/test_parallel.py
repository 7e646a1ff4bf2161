"""Several pytest processes share the suite as tests/parallel.py describes."""

from pathlib import Path

from tests.parallel import LONGEST_FIRST, WHOLE_FOLDERS, num_processes, share_cores, together, turn

ROOT = Path(__file__).parents[1]


def test_named_files_exist() -> None:
    assert all((ROOT / first).exists() for first in LONGEST_FIRST)
    assert all((ROOT / folder / "conftest.py").exists() for folder in WHOLE_FOLDERS)


def test_files_and_folders_with_shared_servers_stay_whole() -> None:
    assert together("tests/shared/test_logs.py::test_a[x::y]") == "tests/shared/test_logs.py"
    assert together("tests/browser/test_page.py::test_a") == together("tests/browser/test_map.py::test_b")
    assert together("tests/kernels/cpu/test_step.py::test_a") == together("tests/kernels/cpu/test_dense.py::test_a")


def test_long_tests_begin_first() -> None:
    nodeids = ["tests/test_security.py::test_a", "tests/gateway/http/test_b.py::test_b", "tests/e2e/test_c.py::test_c"]
    assert min(nodeids, key=turn) == nodeids[2] and turn(nodeids[0]) == turn(nodeids[1])
    assert turn("tests/engine_worker/execution/test_d.py::test_d") < turn("tests/engine_worker/test_e.py::test_e")


def test_tests_that_wait_get_one_process_more_than_cores() -> None:
    assert (num_processes("", 2), num_processes("quick", 2), num_processes("unit", 4)) == (3, 2, 4)


def test_a_process_uses_its_share_of_the_cores() -> None:
    environ: dict[str, str] = {}
    share_cores(environ)
    assert environ == {"OMP_WAIT_POLICY": "passive"}
    environ["PYTEST_XDIST_WORKER_COUNT"] = "100"
    share_cores(environ)
    assert environ["OMP_NUM_THREADS"] == "1"
    environ["OMP_NUM_THREADS"] = "7"
    share_cores(environ)
    assert environ["OMP_NUM_THREADS"] == "7"
