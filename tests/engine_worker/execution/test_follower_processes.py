"""The end of a follower, however it comes, is told at once with its rank, its phase, its status and its own account."""

import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine_worker.execution.follower_processes import FollowerEnd, Followers
from engine_worker.execution.group_messages import GroupStart, MoveBlocks, encode
from engine_worker.execution.settings import ExecutionSettings
from engine_worker.execution.step_channel import RingSender
from engine_worker.scheduling.batch import Transfers

pytestmark = [pytest.mark.tp, pytest.mark.e2e]
SECONDS = 100.0  # a busy machine imports torch for so long


@pytest.fixture
def channel() -> Iterator[RingSender]:
    channel = RingSender(2, 1 << 20)
    yield channel
    channel.close()


def end_of_follower(channel: RingSender, *, kill: bool = False) -> FollowerEnd:
    ends: queue.SimpleQueue[FollowerEnd] = queue.SimpleQueue()
    followers = Followers(2, channel, os.memfd_create("ranks"), ends.put)
    if kill:
        os.kill(followers.pids[0], signal.SIGKILL)
    end = ends.get(timeout=SECONDS)
    followers.close()
    return end


def test_one_that_cannot_load_says_why(channel: RingSender, tmp_path: Path) -> None:
    channel.send(encode(GroupStart(ExecutionSettings(model=tmp_path / "absent", device="cpu", tensor_parallel_size=2))))
    end = end_of_follower(channel)
    assert (end.rank, end.size, end.phase, end.status) == (1, 2, "import", 2)
    assert str(end).startswith("rank 1 of 2 ended in its phase 'import' with exit status 2: ")
    assert str(tmp_path / "absent") in end.cause


def test_one_that_is_told_nonsense_says_what(channel: RingSender) -> None:
    channel.send(encode(MoveBlocks(Transfers())))
    end = end_of_follower(channel)
    assert end.status == 2 and "a group's first message starts it" in end.cause


def test_one_that_is_killed_says_nothing(channel: RingSender) -> None:
    end = end_of_follower(channel, kill=True)
    assert (end.status, end.cause) == (-signal.SIGKILL, "")
    assert str(end) == f"rank 1 of 2 ended in its phase {end.phase or 'start'!r} by signal 9"


def test_one_that_stands_still_is_found_and_its_stacks_are_written(
    channel: RingSender, capfd: pytest.CaptureFixture[str]
) -> None:
    """Before it serves: here it waits for a first message that does not come."""
    ends: queue.SimpleQueue[FollowerEnd] = queue.SimpleQueue()
    followers = Followers(2, channel, os.memfd_create("ranks"), ends.put, patience_beats=3)
    while not channel.beats(1):
        assert ends.empty()
        threading.Event().wait(0.01)  # polls another process
    os.kill(followers.pids[0], signal.SIGSTOP)
    end = ends.get(timeout=SECONDS)
    followers.close()
    assert (end.status, end.cause) == (None, "")
    assert str(end) == f"rank 1 of 2 stands still in its phase {end.phase or 'start'!r}"
    assert "follower.py" in capfd.readouterr().err


def test_a_follower_imports_no_store_no_http_and_no_metrics() -> None:
    program = """
import sys
import engine_worker.follower, engine_worker.execution.rank_group, engine_worker.execution.replica_group
print({name.partition(".")[0] for name in sys.modules} & {"redis", "aiohttp", "prometheus_client", "gateway"})
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_a_follower_unpickles_nothing(channel: RingSender, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not to its end before it serves: an object that is looked up by name in an unpickler ends this follower."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\n"
        "def watch(event, arguments):\n"
        "    if event == 'pickle.find_class': os._exit(99)\n"
        "sys.addaudithook(watch)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    channel.send(encode(GroupStart(ExecutionSettings(model=tmp_path, device="cpu", tensor_parallel_size=2))))
    assert end_of_follower(channel).status == 2  # config.json is missing: torch has been imported by then
