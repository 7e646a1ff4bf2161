"""The needs of tests are derived correctly, and a process without its marker fails the test (tests/needs.py)."""

import asyncio
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests import needs
from tests.conftest import Valkey
from tests.e2e.fleet import Fleet

ROOT = Path(__file__).parents[1]


def starts_one() -> None:
    subprocess.run(["true"], check=True)


class Starter:
    def start(self) -> None:
        starts_one()


async def through_a_class_and_a_name() -> None:
    Starter().start()
    await asyncio.sleep(0)


def starts_none() -> Fleet | None:  # a class that starts processes, named only in an annotation
    return None


def test_a_process_is_found_through_functions_and_classes() -> None:
    assert needs.starts_a_process(starts_one)
    assert needs.starts_a_process(through_a_class_and_a_name)
    assert needs.starts_a_process(Fleet.start)
    assert not needs.starts_a_process(starts_none)


def test_the_markers_are_those_of_the_needs(request: pytest.FixtureRequest) -> None:
    assert {marker.name for marker in request.node.iter_markers()} == {"unit", "quick"}


def test_with_the_store(valkey_server: Valkey, request: pytest.FixtureRequest) -> None:
    assert {marker.name for marker in request.node.iter_markers()} == {"unit", "redis"}


def test_quick_tests_do_not_import_torch(request: pytest.FixtureRequest) -> None:
    """If this fails, a test file that imports torch is missing in needs.NEVER_QUICK."""
    assert request.config.option.markexpr != "quick" or "torch" not in sys.modules


def test_named_files_exist() -> None:
    assert all((ROOT / path).exists() for path in needs.NEVER_QUICK)


def test_a_hidden_process_is_stopped() -> None:
    run = vars(sys.modules["subprocess"])["run"]  # a constant, not a name
    with pytest.raises(pytest.fail.Exception, match="starts a process"):
        run(["true"], check=True)


def test_a_hidden_store_is_stopped(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as client:
        server.bind(path)
        server.listen()
        with pytest.raises(pytest.fail.Exception, match="uses a store"):
            client.connect(path)
