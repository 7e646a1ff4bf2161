"""Startup status: log lines when a phase begins and ends and every 10 s between, and the heartbeat's fields."""

import logging
from dataclasses import dataclass

import pytest

from engine_worker.status import WorkerStatus
from shared.messages import WorkerPhase
from tests.builders import make_engine


@dataclass
class Clock:
    now_seconds: float = 100.0

    def __call__(self) -> float:
        return self.now_seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, logger="worker")
    return caplog


def test_status_phase_logs_begin_and_end(clock: Clock, lines: pytest.LogCaptureFixture) -> None:
    status = WorkerStatus("w0", "1", clock)
    status.report("load", 0.0, "weights")
    clock.now_seconds += 1.5
    status.report("load", 0.5, "135 MiB")
    clock.now_seconds += 1.5
    status.report("load", 1.0, "270 MiB")
    assert lines.messages == ["load   0 % after 0.0 s weights", "load 100 % after 3.0 s 270 MiB"]


def test_status_long_phase_logs_every_ten_seconds(clock: Clock, lines: pytest.LogCaptureFixture) -> None:
    status = WorkerStatus("w0", "1", clock)
    status.report("warmup", 0.2, "8 sequences")
    for _ in range(25):
        clock.now_seconds += 1.0
        status.remind()
    assert lines.messages[1:] == ["warmup  20 % after 10.0 s 8 sequences", "warmup  20 % after 20.0 s 8 sequences"]
    status.report("ready", 1.0)
    lines.clear()
    for _ in range(25):
        clock.now_seconds += 1.0
        status.remind()
    assert lines.messages == []


def test_heartbeat_has_phase_step_and_blocks() -> None:
    status = WorkerStatus("w0", "1")
    status.report("load", 0.25, "x")
    loading = status.heartbeat(num_steps=0)
    assert (loading.worker_id, loading.phase, loading.progress, loading.kv_blocks_total) == ("w0", "load", 0.25, 0)
    status.stats, status.max_model_len, status.worker_id = make_engine().stats(), 256, "w0.1"
    status.max_num_seqs = 16
    status.report(WorkerPhase.READY, 1.0)
    ready = status.heartbeat(num_steps=17)
    assert ready.max_num_seqs == 16
    assert (ready.worker_id, ready.phase, ready.step) == ("w0.1", WorkerPhase.READY, 17)
    assert (ready.kv_blocks_total, ready.kv_blocks_free, ready.max_model_len) == (64, 64, 256)
    assert (ready.running, status.heartbeat(17, in_step=True).running) == (0, 1)
