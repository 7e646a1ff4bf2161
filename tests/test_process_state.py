"""State that a test file leaves in the process is found."""

import logging
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.process_state import FileWatch, left_behind, process_state


def set_variable(value: str) -> None:
    os.environ["PYTHONPATH"] = value


def set_level(level: int) -> None:
    logging.getLogger("aiohttp.access").setLevel(level)


@pytest.mark.parametrize(
    ("change", "undo", "line"),
    [
        (lambda: set_variable("/a"), lambda: set_variable(""), "os.environ['PYTHONPATH']: '' -> '/a'"),
        (lambda: set_level(30), lambda: set_level(0), "the level of logger aiohttp.access: 0 -> 30"),
        (
            lambda: signal.signal(signal.SIGUSR2, print),
            lambda: signal.signal(signal.SIGUSR2, signal.SIG_DFL),
            "the handler of SIGUSR2: None -> <built-in function print>",
        ),
    ],
    ids=["environment", "logger", "signal"],
)
def test_what_is_left_is_named(
    change: Callable[[], object], undo: Callable[[], object], line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "")
    before = process_state()
    change()
    try:
        assert left_behind(before, process_state()) == [line]
    finally:
        undo()
    assert left_behind(before, process_state()) == []


def test_a_file_is_watched_from_its_first_test_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "")
    watch = FileWatch()
    assert watch.ends(Path("all_skipped.py")) == []  # the first file of a process
    watch.begins(Path("first.py"))
    monkeypatch.setenv("PYTHONPATH", "/a")
    watch.begins(Path("first.py"))
    assert watch.ends(Path("first.py")) == ["os.environ['PYTHONPATH']: '' -> '/a'"]
    watch.begins(Path("second.py"))
    assert watch.ends(Path("second.py")) == watch.ends(Path("all_skipped.py")) == []
