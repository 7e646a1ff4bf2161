"""The watchdogs count their own ticks: a hung step ends the process, a paused process or an idle engine does not."""

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


def test_watchdog_step_exceeding_ticks_is_hung(engine: Any, hung: list[str]) -> None:
    watchdog = make_watchdog(engine, hung)
    engine.in_step = True
    for _ in range(2):
        watchdog.tick()
    assert hung == []
    watchdog.tick()
    assert hung == ["exit"]


def test_watchdog_finished_step_resets_count(engine: Any, hung: list[str]) -> None:
    watchdog = make_watchdog(engine, hung)
    engine.in_step = True
    for _ in range(20):
        watchdog.tick()
        watchdog.tick()
        engine.num_steps += 1
    assert hung == []


@pytest.mark.parametrize(("is_cpu", "num_ticks"), [(False, 3), (True, 30)])
def test_watchdog_busy_cpu_step_has_ten_times_the_limit(
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


def test_watchdog_cpu_step_without_cpu_time_is_hung(engine: Any, hung: list[str]) -> None:
    watchdog = make_watchdog(engine, hung)
    watchdog.is_cpu, engine.in_step, engine.cpu_seconds = True, True, 40.0
    for _ in range(4):  # the first tick sees the CPU time used before
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


def test_loop_watch_without_ticks_aborts_with_stacks() -> None:
    process = start_ticking("hangs")
    _, errors = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == -signal.SIGABRT
    assert "made no tick for 2 s" in errors and "most recent call first" in errors


def test_loop_watch_survives_stopped_process() -> None:
    process = start_ticking("ticks")
    process.send_signal(signal.SIGSTOP)
    time.sleep(5)  # more than twice the limit: the watch must detect that the process was stopped
    process.send_signal(signal.SIGCONT)
    time.sleep(2)
    assert process.poll() is None
    process.kill()
    process.communicate(timeout=PATIENCE_SECONDS)  # the watch shares stderr and ends with the process


def test_watchdog_idle_engine_is_not_hung(engine: Any, hung: list[str]) -> None:
    watchdog = make_watchdog(engine, hung)
    for _ in range(20):
        watchdog.tick()
    assert hung == []
