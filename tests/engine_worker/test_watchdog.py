"""The watchdog counts its own ticks: a hung step ends the process, a paused process or an idle engine does not."""

import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any

import pytest

from engine_worker.watchdog import StepWatchdog
from tests.patience import PATIENCE_SECONDS


@dataclass
class Engine:
    num_steps: int = 0
    in_step: bool = False
    cpu_seconds: float = 0.0


@pytest.fixture
def engine() -> Any:
    return Engine()


@pytest.fixture
def hung() -> list[str]:
    return []


def make_watchdog(engine: Any, hung: list[str]) -> StepWatchdog:
    return StepWatchdog(engine, timeout_ticks=3, on_hung=lambda: hung.append("exit"))


def test_a_step_that_lasts_too_many_ticks(engine: Any, hung: list[str]) -> None:
    watchdog = make_watchdog(engine, hung)
    engine.in_step = True
    for _ in range(2):
        watchdog.tick()
    assert hung == []
    watchdog.tick()
    assert hung == ["exit"]


def test_steps_that_end_start_the_count_anew(engine: Any, hung: list[str]) -> None:
    watchdog = make_watchdog(engine, hung)
    engine.in_step = True
    for _ in range(20):
        watchdog.tick()
        watchdog.tick()
        engine.num_steps += 1
    assert hung == []


@pytest.mark.parametrize(("is_cpu", "num_ticks"), [(False, 3), (True, 30)])
def test_a_step_that_computes_on_a_cpu_has_ten_times_as_long(
    engine: Any, hung: list[str], is_cpu: bool, num_ticks: int
) -> None:
    watchdog = make_watchdog(engine, hung)
    watchdog.is_cpu, engine.in_step = is_cpu, True
    for _ in range(num_ticks - 1):
        engine.cpu_seconds += 0.3
        watchdog.tick()
    assert hung == []
    engine.cpu_seconds += 0.3
    watchdog.tick()
    assert hung == ["exit"]


def test_a_step_that_waits_on_a_cpu_is_hung(engine: Any, hung: list[str]) -> None:
    watchdog = make_watchdog(engine, hung)
    watchdog.is_cpu, engine.in_step, engine.cpu_seconds = True, True, 40.0
    for _ in range(4):  # the first has the CPU time of before
        watchdog.tick()
    assert hung == ["exit"]


TICKING = """
import sys, time
from engine_worker.watchdog import LoopWatch
watch = LoopWatch(timeout_ticks=2)
watch.tick()
print("ticking", flush=True)
while True:
    time.sleep(0.1)
    if sys.argv[1] == "ticks":
        watch.tick()
"""


def start_ticking(how: str) -> "subprocess.Popen[str]":
    process = subprocess.Popen(
        [sys.executable, "-c", TICKING, how], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "ticking\n"
    return process


def test_a_process_without_ticks_ends_with_its_stacks() -> None:
    process = start_ticking("hangs")
    _, errors = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == -signal.SIGABRT
    assert "made no tick for 2 s" in errors and "most recent call first" in errors


def test_a_process_that_was_stopped_serves_on() -> None:
    process = start_ticking("ticks")
    process.send_signal(signal.SIGSTOP)
    time.sleep(5)  # more than twice its limit: the watch must see that the process stands still
    process.send_signal(signal.SIGCONT)
    time.sleep(2)
    assert process.poll() is None
    process.kill()
    process.communicate(timeout=PATIENCE_SECONDS)  # the watch ends with it: it has this one's stderr


def test_an_idle_engine_is_not_hung(engine: Any, hung: list[str]) -> None:
    watchdog = make_watchdog(engine, hung)
    for _ in range(20):
        watchdog.tick()
    assert hung == []
