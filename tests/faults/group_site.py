"""Groups of ranks as workers of a World: two processes a worker, on a CPU, whose ranks a test can find and signal."""

import asyncio
import os
import signal
import subprocess
import time
from pathlib import Path

from tests.e2e.fleet import STOP_SECONDS
from tests.e2e.reader import Reader
from tests.faults.conftest import World

ROOT = Path(__file__).parents[2]
PATIENCE_SECONDS = 120.0
# Float32, where the KV that a new owner computes gives the same tokens.
FLAGS = ["--device", "cpu", "--dtype", "float32", "--num-threads", "1", "--tensor-parallel-size", "2"]
FLAGS += ["--kv-cache-memory-bytes", "8M", "--max-model-len", "1024", "--max-num-seqs", "8", "--dead-after", "3"]
FLAGS += ["--max-num-batched-tokens", "16", "--metrics-port", "0"]


class Groups:
    def __init__(self, world: World, model_dir: Path) -> None:
        self.world = world
        self._model_dir = model_dir

    def start(self, name: str, *flags: str) -> "subprocess.Popen[bytes]":
        """Start rank 0, which starts the others."""
        world = self.world
        argv = ["-m", "engine_worker", "--model", str(self._model_dir), "--served-model-name", world.keys.model_name]
        argv += ["--redis-url", world.store.url, "--worker-id", name, *FLAGS, *flags]
        return world.fleet.start(name, *argv, PYTHONPATH=str(ROOT))

    async def follower(self, name: str) -> int:
        """The process id of rank 1, when it is there."""
        pid = self.world.fleet.processes[name].pid
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not (found := followers_of(pid)):
                assert self.world.fleet.processes[name].poll() is None, self.world.fleet.log(name)
                await asyncio.sleep(0.005)
        return found[0]

    async def end_of(self, name: str) -> int:
        """The exit status of rank 0, which is not meant to live."""
        return await asyncio.to_thread(self.world.fleet.processes.pop(name).wait, STOP_SECONDS)

    async def kill(self, name: str, rank: int) -> int:
        """Kill a rank; the exit status of rank 0. Both are gone within a second."""
        first, follower = self.world.fleet.processes[name].pid, await self.follower(name)
        os.kill(follower if rank else first, signal.SIGKILL)
        killed_at = time.monotonic()
        status = await self.end_of(name)
        await gone(follower)
        seconds = time.monotonic() - killed_at
        print(f"{name}: the group was gone {1e3 * seconds:.0f} ms after the end of rank {rank}")
        assert seconds < max(1.0, os.getloadavg()[0])  # on an idle machine a few ms; neighbours take their turns
        return status

    async def holder(self) -> str:
        """The worker that has claimed requests."""
        world = self.world
        async with asyncio.timeout(PATIENCE_SECONDS):
            while True:
                for status in world.client.fleet.snapshot():
                    name = status.heartbeat.worker_id.split(".")[0]
                    if status.heartbeat.running and name in world.fleet.processes:
                        return name
                await asyncio.sleep(0.01)


def followers_of(pid: int) -> list[int]:
    try:
        found = [path.read_text().split() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    except OSError:
        return []
    return [int(child) for children in found for child in children if "engine_worker.follower" in _command(int(child))]


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


async def gone(pid: int) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while "engine_worker.follower" in _command(pid):
            await asyncio.sleep(0.002)


async def outputs(readers: list[Reader]) -> list[list[int]]:
    """The tokens of all, when all have ended."""
    for reader in readers:
        end = await asyncio.wait_for(reader.finished, PATIENCE_SECONDS)
        assert end.usage.completion_tokens == len(reader.tokens)
    return [reader.tokens for reader in readers]
