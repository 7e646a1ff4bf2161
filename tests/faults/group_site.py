"""Groups of ranks as workers of a World: several processes per worker, whose ranks a test can find and signal."""

import asyncio
import contextlib
import os
import resource
import signal
import struct
import subprocess
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path

from tests.e2e.fleet import STOP_SECONDS
from tests.e2e.reader import Reader
from tests.faults.conftest import World

ROOT = Path(__file__).parents[2]
PATIENCE_SECONDS = 120.0
# Float32, in which the KV recomputed by a new owner gives the same tokens.
FLAGS = ["--device", "cpu", "--dtype", "float32", "--num-threads", "1", "--tensor-parallel-size", "2"]
FLAGS += ["--kv-cache-memory-bytes", "8M", "--max-model-len", "1024", "--max-num-seqs", "8", "--dead-after", "3"]
FLAGS += ["--max-num-batched-tokens", "16", "--metrics-port", "0"]
STEP_TIMEOUT_SECONDS = 60  # default of a group
FLAGS += ["--step-timeout-seconds", str(STEP_TIMEOUT_SECONDS)]


class Groups:
    def __init__(self, world: World, model_dir: Path, flags: Sequence[str] = FLAGS) -> None:
        """Create groups with these flags, by default on a CPU."""
        self.world = world
        self.size = int(flags[-1 - flags[::-1].index("--tensor-parallel-size") + 1])  # the last flag counts
        self._flags = flags
        # From each kill() until no rank and no shared memory of a group was left, and until its exit reaper had ended
        # too.
        self.gone_seconds: list[float] = []
        self.wills_gone_seconds: list[float] = []
        self._model_dir = model_dir
        self._temporary = model_dir.parent / "tmp"  # of all groups; must be empty afterwards
        self._temporary.mkdir(exist_ok=True)

    def start(self, name: str, *flags: str, python_path: Path | None = None) -> "subprocess.Popen[bytes]":
        """Start rank 0, which starts the others; modules in `python_path` come before ours."""
        world = self.world
        argv = ["-m", "engine_worker", "--model", str(self._model_dir), "--served-model-name", world.keys.model_name]
        argv += ["--redis-url", world.store.url, "--worker-id", name, *self._flags, *flags]
        path = os.pathsep.join(map(str, filter(None, [python_path, ROOT])))
        return world.fleet.start(name, *argv, PYTHONPATH=path, TMPDIR=str(self._temporary))

    async def follower(self, name: str, rank: int = 1) -> int:
        """Return the process id of a rank other than 0, once it exists."""
        pid = self.world.fleet.processes[name].pid
        async with asyncio.timeout(PATIENCE_SECONDS):
            while rank not in (found := followers_of(pid)):
                assert self.world.fleet.processes[name].poll() is None, self.world.fleet.log(name)
                await asyncio.sleep(0.005)
        return found[rank]

    async def end_of(self, name: str) -> int:
        """Return the exit status of rank 0, which is expected to end."""
        status = await asyncio.to_thread(self.world.fleet.processes[name].wait, STOP_SECONDS)
        del self.world.fleet.processes[name]  # the remaining processes are expected to live
        return status

    async def kill(self, name: str, rank: int, on_end: Callable[[], Awaitable[object]] | None = None) -> int:
        """Kill a rank and return the exit status of rank 0; everything of the group is gone before a step times out.

        `on_end` is called once rank 0 has ended, as a supervisor would.
        """
        first = self.world.fleet.processes[name].pid
        followers = [await self.follower(name, number) for number in range(1, self.size)]
        wills, memories = exit_reapers_of(first), memories_of(first)
        assert memories
        os.kill([first, *followers][rank], signal.SIGKILL)
        killed_at = time.monotonic()
        status = await self.end_of(name)
        supervising = asyncio.ensure_future(on_end()) if on_end is not None else None
        for follower in followers:
            await gone(follower)
        async with asyncio.timeout(PATIENCE_SECONDS):
            while any(memories & memories_of(pid) for pid in all_pids()):  # a process closes its files last
                await asyncio.sleep(0.002)
        seconds = time.monotonic() - killed_at
        self.gone_seconds.append(seconds)
        print(f"{name}: the group was gone {1e3 * seconds:.0f} ms after the end of rank {rank}")
        # A few ms on an idle machine. The end must be detected directly, not by a step's timeout.
        assert seconds < STEP_TIMEOUT_SECONDS
        assert not list(self._temporary.iterdir())
        for pid in wills:
            await gone(pid)
        self.wills_gone_seconds.append(time.monotonic() - killed_at)
        if supervising is not None:
            await supervising
        return status

    async def hold(self, name: str, phase: str) -> int:
        """Stop the follower in a phase of its start in which rank 0 then waits for it; return its process id."""
        follower = await self.follower(name)
        async with asyncio.timeout(PATIENCE_SECONDS):
            while (now := phase_of(follower)) != phase:
                # Only importing takes long enough for a slower poll.
                await asyncio.sleep(0.002 if now in ("", "import") else 0.0)
        os.kill(follower, signal.SIGSTOP)
        return follower

    async def kill_while(self, name: str, phase: str, rank: int) -> int:
        """Start a group, kill a rank in a phase of its start, and return the exit status of rank 0."""
        self.start(name)
        await self.hold(name, phase)
        assert "serving as" not in self.world.fleet.log(name)
        return await self.kill(name, rank)

    async def refuse_memory(self, name: str) -> None:
        """Make every further memory allocation of the follower fail."""
        resource.prlimit(await self.follower(name), resource.RLIMIT_AS, (1, 1))

    async def holder(self, reader: Reader) -> str:
        """Return the worker that runs the reader's request; heartbeats may tell of requests that have ended."""
        redis, key = self.world.connections.commands, self.world.keys.request(reader.request.request_id)
        async with asyncio.timeout(PATIENCE_SECONDS):
            while (worker_id := await redis.hget(key, "worker")) is None:
                await asyncio.sleep(0.01)
        assert isinstance(worker_id, bytes)
        return worker_id.decode().split(".")[0]


def all_pids() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()]


def memories_of(pid: int) -> set[int]:
    """Return the inodes of the memfds that the ranks of a process's group share."""
    return {inode for link, _, inode in open_files(pid) if "memfd:pagestream-" in link}


def steps_of(pid: int) -> Path:
    """Return the shared memory of a group's step channel."""
    return next(path for link, path, _ in open_files(pid) if "pagestream-steps" in link)


def open_files(pid: int) -> Iterator[tuple[str, Path, int]]:
    """Return target and inode of each open file; a loading process may close files meanwhile."""
    with contextlib.suppress(OSError):  # the process has ended, or is another user's
        for path in list(Path(f"/proc/{pid}/fd").iterdir()):
            with contextlib.suppress(OSError):
                yield os.readlink(path), path, path.stat().st_ino


def phase_of(follower: int) -> str:
    """Return the phase that the rank wrote into its page of the channel; empty before."""
    try:
        with steps_of(follower).open("rb") as memory:
            page = os.pread(memory.fileno(), 4096, 4096)
    except (OSError, StopIteration):
        return ""
    (length,) = struct.unpack_from("<H", page, 64)
    phases = page[66 : 66 + length].decode().splitlines()
    return phases[-1].rpartition(" ")[0] if phases else ""


def followers_of(pid: int) -> dict[int, int]:
    """Return process ids by rank; the rank follows the parent's process id in a follower's command line."""
    found = {child: _command(child).partition("engine_worker.follower\0")[2] for child in _children_of(pid, "follower")}
    return {int(arguments.split("\0")[1]): child for child, arguments in found.items() if arguments}


def exit_reapers_of(pid: int) -> list[int]:
    """Return the process ids of exit reapers that are running."""
    return _children_of(pid, "engine_worker.exit_reaper")


def _children_of(pid: int, program: str) -> list[int]:
    try:
        found = [path.read_text().split() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    except OSError:
        return []
    return [int(child) for children in found for child in children if program in _command(int(child))]


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


async def gone(pid: int) -> None:
    """Wait until a follower or an exit reaper has ended."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while "engine_worker." in _command(pid):
            await asyncio.sleep(0.002)


async def outputs(readers: list[Reader]) -> list[list[int]]:
    """Return the tokens of all streams once all have ended."""
    for reader in readers:
        end = await asyncio.wait_for(reader.finished, PATIENCE_SECONDS)
        assert end.usage.completion_tokens == len(reader.tokens)
    return [reader.tokens for reader in readers]
