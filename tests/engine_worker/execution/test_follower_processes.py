"""The end of a follower process, for any reason, is reported with its rank, phase, status, and cause."""

import os
import queue
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from engine_worker.execution.ranks.follower_processes import FollowerEnd, Followers
from engine_worker.execution.ranks.group_messages import GroupStart, MoveBlocks, encode
from engine_worker.execution.settings import ExecutionSettings
from engine_worker.kv.transfers import Transfers

pytestmark = [pytest.mark.tp, pytest.mark.e2e]
SECONDS = 100.0  # importing torch can take this long on a busy machine


class Started:
    """Followers of a group of two, and the queue of their end reports."""

    def __init__(self, first: GroupStart | MoveBlocks | None = None, **options: int) -> None:
        self.ends: queue.SimpleQueue[FollowerEnd] = queue.SimpleQueue()
        self.followers = Followers(2, self.ends.put, **options)
        self.channel = self.followers.channel
        if first is not None:
            self.channel.make_slots(1 << 20)
            self.channel.send(encode(first))

    def end(self) -> FollowerEnd:
        end = self.ends.get(timeout=SECONDS)
        self.followers.close()
        return end


def start_with(model: Path) -> GroupStart:
    return GroupStart(ExecutionSettings(model=model, device="cpu", tensor_parallel_size=2))


def test_follower_load_failure_reports_cause(tmp_path: Path) -> None:
    end = Started(start_with(tmp_path / "absent")).end()
    assert (end.rank, end.size, end.phase, end.status) == (1, 2, "import", 2)
    assert str(end).startswith("rank 1 of 2 ended in its phase 'import' with exit status 2: ")
    assert str(tmp_path / "absent") in end.cause


def test_follower_invalid_first_message_reports_cause() -> None:
    end = Started(MoveBlocks(Transfers())).end()
    assert end.status == 2 and "first message of a group" in end.cause


def test_follower_killed_reports_signal_without_cause() -> None:
    started = Started()
    os.kill(started.followers.pids[0], signal.SIGKILL)
    end = started.end()
    assert (end.status, end.cause) == (-signal.SIGKILL, "")
    assert str(end) == f"rank 1 of 2 ended in its phase {end.phase or 'start'!r} by signal 9"


def test_follower_ended_is_skipped_by_dump_stacks() -> None:
    """The step watchdog may request stacks at any moment, before it ends this process."""
    started = Started()
    os.kill(started.followers.pids[0], signal.SIGKILL)
    started.ends.get(timeout=SECONDS)
    started.followers.dump_stacks(seconds=0.0)
    started.followers.close()


HOLDS_THE_INTERPRETER = """
import ctypes
from engine_worker.execution.ranks.step_channel import RingReceiver
beat = RingReceiver.beat
def beat_once(self):
    beat(self)
    ctypes.PyDLL(None).sleep(1000)  # keeps the interpreter's lock
RingReceiver.beat = beat_once
"""


def test_follower_hung_is_detected_with_stacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Covers the time before it serves: it waits for a first message that never arrives."""
    (tmp_path / "sitecustomize.py").write_text(HOLDS_THE_INTERPRETER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    end = Started(patience_beats=3).end()
    assert (end.status, end.cause) == (None, "")
    assert str(end) == f"rank 1 of 2 does not respond in its phase {end.phase or 'start'!r}"
    assert "follower.py" in capfd.readouterr().err


NEVER_BEGINS = """
import sys, threading
if "engine_worker.follower" in sys.orig_argv:
    threading.Event().wait()  # like an interpreter whose files are on an unresponsive disk
"""


def test_follower_that_never_starts_is_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text(NEVER_BEGINS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    end = Started(patience_beats=1).end()
    assert (end.status, end.phase, end.cause) == (None, "", "")
    assert str(end) == "rank 1 of 2 does not respond in its phase 'start'"


def test_follower_stopped_by_signal_is_detected(capfd: pytest.CaptureFixture[str]) -> None:
    """The stop itself is detected, because missed beats would take a minute. A follower continued at once stays."""
    started = Started()
    pid = started.followers.pids[0]
    while not started.channel.beats(1):
        assert started.ends.empty()
        threading.Event().wait(0.01)  # polls another process
    for number in (signal.SIGSTOP, signal.SIGCONT):
        os.kill(pid, number)
    beats = started.channel.beats(1)
    while started.channel.beats(1) < beats + 3:
        assert started.ends.empty()
        threading.Event().wait(0.01)  # as above
    os.kill(pid, signal.SIGSTOP)
    end = started.end()
    assert (end.status, end.cause) == (None, "stopped by a signal")
    assert str(end) == f"rank 1 of 2 does not respond in its phase {end.phase or 'start'!r}: stopped by a signal"
    assert "follower.py" in capfd.readouterr().err


def test_follower_imports_no_store_http_or_metrics() -> None:
    program = """
import sys
import engine_worker.follower, engine_worker.execution.load.rank_group, engine_worker.execution.ranks.replica_group
print({name.partition(".")[0] for name in sys.modules} & {"redis", "aiohttp", "prometheus_client", "gateway"})
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
