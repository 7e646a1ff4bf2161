"""Supervise the child processes of `serve`.

    SupervisedChild     starts a process, and after its death runs a hook, then restarts it or gives up. Each start has
                        its own command, because a worker's id contains the number of the start
    ProcessSupervisor   stops all children if one gives up; children stop in the order of their ranks

A hook is also called for a child that a signal has stopped.
"""

import asyncio
import itertools
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeVar

from pagestream.child_process import ChildCommand, ChildProcess, LineSink
from pagestream.restart_policy import CANNOT_START, GiveUp, RestartPolicy, describe_exit
from shared.processes import LOOK_SECONDS, STOPPED_LOOKS, is_stopped

_T = TypeVar("_T")


class ChildGaveUp(RuntimeError):
    """A child dies repeatedly. The message contains its last lines of output."""

    def __init__(self, message: str, exit_status: int = 1) -> None:
        """Set the supervisor's exit status: 2 if the child reported that it cannot start, else 1."""
        super().__init__(message)
        self.exit_status = exit_status


@dataclass
class SupervisedChild:
    name: str
    command: Callable[[int], ChildCommand]  # number of the start, from 0
    on_line: LineSink
    on_death: Callable[[int, str], Awaitable[None]]  # number of the start, cause; the next start waits for it
    on_stopped: Callable[[int], Awaitable[None]] | None = None  # number of the start; once per stop by a signal
    is_ready: bool = False  # set by the owner; reset with each start
    policy: RestartPolicy = field(default_factory=RestartPolicy)
    process: ChildProcess | None = None
    lives: int = 0
    signaled: asyncio.Event = field(default_factory=asyncio.Event)  # a child has ended, stopped or continued

    async def run(self) -> NoReturn:
        """Keep the child alive until cancelled. A cancellation leaves the process running for stop().

        Raises:
            ChildGaveUp: If the child dies repeatedly, or cannot start.
        """
        while True:
            self.is_ready = False
            self.process = await ChildProcess.start(self.command(self.lives), self.on_line)
            watch = asyncio.create_task(self._watch_for_stops(self.process.process.pid, self.lives))
            try:
                status = await self.process.wait()
            finally:
                watch.cancel()
            self.process.kill()  # its own children
            self.lives += 1
            await self.on_death(self.lives - 1, describe_exit(status))
            answer = self.policy.after_death(time.monotonic(), exit_status=status, was_ready=self.is_ready)
            if isinstance(answer, GiveUp):
                tail = "\n".join(f"    {line}" for line in self.process.last_lines)
                exit_status = CANNOT_START if status == CANNOT_START and not self.is_ready else 1
                raise ChildGaveUp(f"{self.name}: not restarted: {answer.reason}. Its last lines:\n{tail}", exit_status)
            await asyncio.sleep(answer.delay_seconds)

    async def _watch_for_stops(self, pid: int, life: int) -> None:
        if self.on_stopped is None or sys.platform != "linux":
            return
        was_reported = False
        while True:
            await self.signaled.wait()
            self.signaled.clear()
            was_reported = was_reported and is_stopped(pid)
            if not was_reported and await _stays_stopped(pid):
                was_reported = True
                await self.on_stopped(life)

    async def stop(self, grace_seconds: float) -> None:
        """End the running process. Cancel run() first."""
        if self.process is not None:
            await self.process.stop(grace_seconds)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()


async def _stays_stopped(pid: int) -> bool:
    for _ in range(STOPPED_LOOKS):
        if not is_stopped(pid):
            return False
        await asyncio.sleep(LOOK_SECONDS)
    return is_stopped(pid)


class ProcessSupervisor:
    def __init__(self) -> None:
        """Handle SIGCHLD. Create it in the running event loop of the main thread."""
        self._loop = asyncio.get_running_loop()
        self._loop.add_signal_handler(signal.SIGCHLD, self._wake_watchers)
        self._children: list[tuple[int, SupervisedChild]] = []
        self._tasks: list[asyncio.Task[Any]] = []
        self._failure: asyncio.Future[None] = self._loop.create_future()

    @property
    def children(self) -> list[SupervisedChild]:
        return [child for _rank, child in self._children]

    def start(self, child: SupervisedChild, *, stop_rank: int) -> None:
        """Keep `child` alive. Lower ranks are stopped first, equal ones at the same time."""
        self._children.append((stop_rank, child))
        self.watch(child.run(), name=child.name)

    def watch(self, duty: Coroutine[Any, Any, Any], *, name: str) -> None:
        """Run a coroutine that must not end; its error ends while_all_live()."""
        task = asyncio.create_task(duty, name=name)
        task.add_done_callback(self._note_end)
        self._tasks.append(task)

    async def while_all_live(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Await `work`. Raises the error of a child that gives up before."""
        task = asyncio.create_task(work)
        try:
            either: set[asyncio.Future[Any]] = {task, self._failure}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if self._failure.done():
                self._failure.result()
            return await task
        finally:
            task.cancel()
            await asyncio.wait({task})

    async def stop(self, grace_seconds: float) -> None:
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        in_order = sorted(self._children, key=lambda entry: entry[0])
        for _rank, group in itertools.groupby(in_order, key=lambda entry: entry[0]):
            await asyncio.gather(*(child.stop(grace_seconds) for _, child in group))
        self._failure.cancel()
        self._loop.remove_signal_handler(signal.SIGCHLD)

    def kill(self) -> None:
        for _rank, child in self._children:
            child.kill()

    def _wake_watchers(self) -> None:
        for child in self.children:
            child.signaled.set()

    def _note_end(self, task: asyncio.Task[Any]) -> None:
        if task.cancelled() or self._failure.done():
            return
        self._failure.set_exception(task.exception() or RuntimeError(f"{task.get_name()} ended"))
