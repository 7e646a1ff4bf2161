"""Keeps one child alive: starts it, and when it dies does what its death needs, then starts it again or gives up.

Each life of a child is another command (the worker's id carries the number of the life). Knows the policy of restarts
and the hooks it was given; knows neither Redis nor what the children are.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import NoReturn

from pagestream.child_process import ChildCommand, ChildProcess, LineSink
from pagestream.restart_policy import GiveUp, RestartPolicy, describe_exit


class ChildGaveUp(RuntimeError):
    """A child that keeps dying. The message holds its last lines."""


@dataclass
class SupervisedChild:
    name: str
    command: Callable[[int], ChildCommand]  # number of the life, from 0
    on_line: LineSink
    on_death: Callable[[int, str], Awaitable[None]]  # which life ended, how; the next begins after it
    is_ready: bool = False  # set by whoever sees it; false again with each life
    policy: RestartPolicy = field(default_factory=RestartPolicy)
    process: ChildProcess | None = None
    lives: int = 0

    async def run(self) -> NoReturn:
        """Until cancelled, which leaves the process to `stop`. Raises ChildGaveUp."""
        while True:
            self.is_ready = False
            self.process = await ChildProcess.start(self.command(self.lives), self.on_line)
            status = await self.process.wait()
            self.process.kill()  # what it may have started itself
            self.lives += 1
            await self.on_death(self.lives - 1, describe_exit(status))
            answer = self.policy.after_death(time.monotonic(), exit_status=status, was_ready=self.is_ready)
            if isinstance(answer, GiveUp):
                tail = "\n".join(f"    {line}" for line in self.process.last_lines)
                raise ChildGaveUp(f"{self.name} is given up: {answer.reason}. Its last lines:\n{tail}")
            await asyncio.sleep(answer.delay_seconds)

    async def stop(self, grace_seconds: float) -> None:
        """End the running process; `run` must have been cancelled."""
        if self.process is not None:
            await self.process.stop(grace_seconds)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
