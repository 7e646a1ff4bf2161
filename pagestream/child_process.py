"""One run of a child process: its start, its output, and its end.

The child leads its own session, so the terminal's Ctrl-C reaches only the supervisor, which decides the order of the
shutdown. On Linux the kernel ends the child with the supervisor, even after `kill -9`. This is requested between fork
and exec, so no child can be left behind.
"""

import asyncio
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shared.processes import exit_with_parent

KEPT_LINES = 20
MAX_LINE_BYTES = 2**20

LineSink = Callable[[str, str], None]  # child's name, line


@dataclass(frozen=True, kw_only=True)
class ChildCommand:
    """Command of a child. The kernel sends `death_signal` if the supervisor dies without stopping the child."""

    name: str
    argv: Sequence[str]
    environ: Mapping[str, str] | None = None  # None: inherited
    cwd: Path | None = None
    umask: int = -1  # -1: inherited
    death_signal: signal.Signals = signal.SIGKILL


@dataclass
class ChildProcess:
    name: str
    process: asyncio.subprocess.Process
    last_lines: deque[str] = field(default_factory=lambda: deque(maxlen=KEPT_LINES))
    _reader: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, command: ChildCommand, on_line: LineSink | None = None) -> "ChildProcess":
        """Start the child; raise OSError. Main thread only, because the kernel watches the thread that forks."""
        process = await asyncio.create_subprocess_exec(
            *command.argv,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=command.environ,
            cwd=command.cwd,
            umask=command.umask,
            start_new_session=True,
            limit=MAX_LINE_BYTES,
            preexec_fn=_before_exec(command.death_signal),
        )
        child = cls(command.name, process)
        child._reader = asyncio.create_task(child._read_output(on_line), name=f"output of {command.name}")
        return child

    async def wait(self) -> int:
        """Return the exit status, or minus the signal number, after all output has been read."""
        status = await self.process.wait()
        if self._reader is not None:
            await asyncio.wait([self._reader], timeout=1.0)  # a grandchild may hold the pipe open
            self._reader.cancel()
        return status

    async def stop(self, grace_seconds: float) -> int:
        """Send SIGTERM, and after `grace_seconds` SIGKILL to the whole session."""
        self.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(grace_seconds):
                await self.process.wait()
        except TimeoutError:
            self.kill()
        return await self.wait()

    def send_signal(self, number: signal.Signals) -> None:
        if self.process.returncode is None:
            self.process.send_signal(number)

    def kill(self) -> None:
        try:
            os.killpg(self.process.pid, signal.SIGKILL)  # the child leads its session: this includes its children
        except ProcessLookupError:
            return

    async def _read_output(self, on_line: LineSink | None) -> None:
        assert self.process.stdout is not None
        while True:
            try:
                raw = await self.process.stdout.readline()
            except ValueError:  # a line over the limit, which asyncio dropped
                continue
            if not raw:
                return
            line = raw.decode(errors="replace").rstrip()
            self.last_lines.append(line)
            if on_line is not None:
                on_line(self.name, line)


def _before_exec(death_signal: signal.Signals) -> Callable[[], None] | None:
    if sys.platform != "linux":
        return None  # on other systems a killed supervisor leaves its children behind
    supervisor_pid = os.getpid()
    return lambda: exit_with_parent(supervisor_pid, death_signal)
