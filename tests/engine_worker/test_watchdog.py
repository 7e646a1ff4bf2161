"""The watchdog counts its own ticks: a hung step ends the process, a paused process or an idle engine does not."""

from dataclasses import dataclass
from typing import Any

import pytest

from engine_worker.watchdog import StepWatchdog


@dataclass
class Engine:
    num_steps: int = 0
    in_step: bool = False


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


def test_an_idle_engine_is_not_hung(engine: Any, hung: list[str]) -> None:
    watchdog = make_watchdog(engine, hung)
    for _ in range(20):
        watchdog.tick()
    assert hung == []
