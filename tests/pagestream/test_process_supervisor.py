"""Supervised children: restarts, giving up, and the order of the stop. Real processes."""

import asyncio
import os
import signal
import sys
from collections.abc import Callable

import pytest

from pagestream.child_process import ChildCommand, ChildProcess
from pagestream.process_supervisor import ChildGaveUp, ProcessSupervisor, SupervisedChild
from tests.patience import PATIENCE_SECONDS

SLEEPS = "import time; print('up', flush=True); time.sleep(60)"


class Record:
    """Events in order, and a way to wait for one."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self._grew = asyncio.Event()

    def add(self, event: str) -> None:
        self.events.append(event)
        self._grew.set()

    async def until(self, holds: Callable[[list[str]], bool]) -> None:
        while not holds(self.events):
            self._grew.clear()
            await self._grew.wait()

    def child(self, name: str, code: str = SLEEPS) -> SupervisedChild:
        async def on_death(life: int, how: str) -> None:
            self.add(f"{name} life {life} ended with {how}")

        def command(life: int) -> ChildCommand:
            self.add(f"{name} life {life} begins")
            return ChildCommand(name=name, argv=[sys.executable, "-c", code, str(life)])

        return SupervisedChild(name, command, lambda who, line: self.add(f"{who}: {line}"), on_death)


async def test_killed_child_restarts_after_its_exit_was_handled() -> None:
    record, supervisor = Record(), ProcessSupervisor()
    child = record.child("worker")
    supervisor.start(child, stop_rank=0)
    await record.until(lambda events: "worker: up" in events)
    child.is_ready = True
    child.kill()
    await record.until(lambda events: events.count("worker: up") == 2)
    assert not child.is_ready
    await supervisor.stop(5.0)
    assert record.events == [
        "worker life 0 begins", "worker: up", "worker life 0 ended with signal 9",
        "worker life 1 begins", "worker: up",
    ]  # fmt: skip


async def test_restarts_leak_no_descriptor() -> None:
    """Not even if a grandchild, such as the exit reaper, holds the output open longer."""
    command = ChildCommand(name="worker", argv=["sh", "-c", "setsid sleep 0.2 & kill -9 $$"])
    await (await ChildProcess.start(command)).wait()  # descriptors that the event loop itself keeps
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(10):
        child = await ChildProcess.start(command)
        assert await child.wait() == -signal.SIGKILL
    async with asyncio.timeout(PATIENCE_SECONDS):
        while len(os.listdir("/proc/self/fd")) > before:
            await asyncio.sleep(0.01)  # polls another process, which has no event to wait for


async def test_stop_is_reported_once_and_a_short_one_never() -> None:
    record, supervisor = Record(), ProcessSupervisor()
    child = record.child("worker")

    async def on_stopped(life: int) -> None:
        record.add(f"worker life {life} is stopped")

    child.on_stopped = on_stopped
    supervisor.start(child, stop_rank=0)
    await record.until(lambda events: "worker: up" in events)
    assert child.process is not None
    for number in (signal.SIGSTOP, signal.SIGCONT, signal.SIGSTOP):
        child.process.send_signal(number)
    await record.until(lambda events: "worker life 0 is stopped" in events)
    child.process.send_signal(signal.SIGCONT)
    child.kill()
    await record.until(lambda events: events.count("worker: up") == 2)
    await supervisor.stop(5.0)
    assert record.events == [
        "worker life 0 begins", "worker: up", "worker life 0 is stopped", "worker life 0 ended with signal 9",
        "worker life 1 begins", "worker: up",
    ]  # fmt: skip


async def test_stop_is_not_reported_again_when_another_child_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagestream.process_supervisor.LOOK_SECONDS", 0.0)  # by default reported again after the test
    record, supervisor = Record(), ProcessSupervisor()
    child, other = record.child("worker"), record.child("gateway")

    async def on_stopped(life: int) -> None:
        record.add("worker is stopped")

    child.on_stopped = on_stopped
    for one in (child, other):
        supervisor.start(one, stop_rank=0)
    await record.until(lambda events: {"worker: up", "gateway: up"} <= set(events))
    assert child.process is not None
    child.process.send_signal(signal.SIGSTOP)
    await record.until(lambda events: "worker is stopped" in events)
    other.kill()
    await record.until(lambda events: events.count("gateway: up") == 2)
    assert record.events.count("worker is stopped") == 1
    child.kill()
    await supervisor.stop(5.0)


async def test_unstartable_child_ends_the_work_with_its_last_lines() -> None:
    record, supervisor = Record(), ProcessSupervisor()
    supervisor.start(record.child("worker", "print('out of memory'); raise SystemExit(3)"), stop_rank=0)
    with pytest.raises(ChildGaveUp, match="worker: not restarted: it exited twice with exit status 3") as given_up:
        await supervisor.while_all_live(asyncio.Event().wait())
    assert str(given_up.value).endswith("Its last lines:\n    out of memory")
    await supervisor.stop(5.0)


async def test_finished_work_returns_its_result_and_keeps_children() -> None:
    record, supervisor = Record(), ProcessSupervisor()
    child = record.child("worker")
    supervisor.start(child, stop_rank=0)
    assert await supervisor.while_all_live(asyncio.sleep(0, "done")) == "done"
    await record.until(lambda events: "worker: up" in events)
    assert child.process is not None
    assert child.process.process.returncode is None
    await supervisor.stop(5.0)
    assert child.process.process.returncode == -15


async def test_children_are_stopped_in_the_order_of_their_ranks() -> None:
    says_its_end = (
        "import signal, sys, time; signal.signal(15, lambda *_: (print('down', flush=True), sys.exit(0)));"
        "print('up', flush=True); time.sleep(60)"
    )
    record, supervisor = Record(), ProcessSupervisor()
    supervisor.start(record.child("worker", says_its_end), stop_rank=1)
    supervisor.start(record.child("gateway", says_its_end), stop_rank=0)
    await record.until(lambda events: {"worker: up", "gateway: up"} <= set(events))
    await supervisor.stop(5.0)
    assert record.events[-2:] == ["gateway: down", "worker: down"]


async def test_failed_duty_ends_the_work() -> None:
    supervisor = ProcessSupervisor()

    async def duty() -> None:
        raise OSError("no more store")

    supervisor.watch(duty(), name="store")
    with pytest.raises(OSError, match="no more store"):
        await supervisor.while_all_live(asyncio.Event().wait())
    await supervisor.stop(1.0)
