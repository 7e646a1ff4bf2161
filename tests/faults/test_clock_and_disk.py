"""The wall clock jumps, the disk is full: what a machine does to every process on it at once."""

import asyncio
import os
import shutil
import subprocess
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
import redis

from gateway.store.inference_client import StoreUnavailable
from tests.builders import make_request
from tests.faults.conftest import Store, World

pytestmark = [pytest.mark.e2e, pytest.mark.redis]
StartWorld = Callable[..., Awaitable[World]]
SOURCE = Path(__file__).with_name("jumping_clock.c")
HOUR_SECONDS = 3600


class JumpingClock:
    """The wall clock of processes that are started with `environ`."""

    def __init__(self, directory: Path) -> None:
        library, self._file = directory / "jumping_clock.so", directory / "offset"
        subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-o", str(library), str(SOURCE)], check=True)
        self.jump_to(0)
        self.environ = {"LD_PRELOAD": str(library), "JUMPING_CLOCK": str(self._file)}

    def jump_to(self, offset_seconds: int) -> None:
        with self._file.open("r+b" if self._file.exists() else "wb") as file:  # the file is mapped: never a new one
            file.write(offset_seconds.to_bytes(8, "little", signed=True))


@pytest.mark.skipif(shutil.which("gcc") is None, reason="the clock is bent by a library that gcc builds")
@pytest.mark.parametrize("jump_seconds", [HOUR_SECONDS, -HOUR_SECONDS], ids=["forward", "back"])
async def test_the_wall_clock_jumps_by_an_hour(
    start_world: StartWorld, store: Store, tmp_path: Path, jump_seconds: int
) -> None:
    """Of the store and the workers. Nothing is reaped, no time is over: only monotonic clocks and ticks decide."""
    clock = JumpingClock(tmp_path)
    store.kill()
    store.environ = clock.environ
    store.start()
    world = await start_world()
    flags = ["--script-step-seconds", "0.02", "--dead-after", "3"]
    world.start_worker("w0", *flags, **clock.environ)
    readers = world.read(4, max_tokens=300)
    await world.all_have(readers, 20)
    world.start_worker("w1", *flags, **clock.environ)
    await world.has_ready("w0", "w1")
    with store.client() as client:
        before_seconds, _ = client.time()
        clock.jump_to(jump_seconds)
        async with asyncio.timeout(10):  # the store reads its clock when its event loop turns, not at each command
            while abs(client.time()[0] - before_seconds - jump_seconds) > 60:
                await asyncio.sleep(0.02)
    await world.all_complete(readers)
    later = world.read(2, max_tokens=20)
    await world.all_complete(later)
    assert await world.attempts(later) == [1, 1]
    assert "reaped" not in world.fleet.all_logs()
    await world.nothing_is_left()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """2 MB."""
    directory = tmp_path / "disk"
    directory.mkdir()
    options = ["-t", "tmpfs", "-o", "size=2m", "tmpfs", str(directory)]
    if os.geteuid() != 0 or subprocess.run(["mount", *options], check=False, capture_output=True).returncode != 0:
        pytest.skip("a small disk is mounted by root alone")
    yield directory
    subprocess.run(["umount", "--lazy", str(directory)], check=True)


async def test_the_disk_of_the_store_is_full(start_world: StartWorld, store: Store, small_disk: Path) -> None:
    """It refuses every write. New requests are refused, workers hold their step, and it heals when there is room."""
    store.kill()
    store.directory, store.append_fsync = small_disk, "everysec"
    store.start()
    world = await start_world()
    world.start_worker("w0", "--script-step-seconds", "0.02")
    readers = world.read(4, max_tokens=200)
    await world.all_have(readers, 20)
    ballast = small_disk / "ballast"
    with ballast.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        while True:
            file.write(bytes(4096))
    with store.client() as client:
        async with asyncio.timeout(20):
            while await asyncio.to_thread(takes_writes, client):
                await asyncio.sleep(0.05)
        with pytest.raises(StoreUnavailable):
            await world.client.submit(make_request(5))
        with pytest.raises(StoreUnavailable):  # what /readyz asks
            await world.client.write_probe()
        assert not any(reader.finished.done() for reader in readers)
        ballast.unlink()
    await world.all_complete(readers)
    assert await world.attempts(readers) == [1] * len(readers)
    await world.nothing_is_left()


def takes_writes(client: redis.Redis) -> bool:
    try:
        return bool(client.set("filler", "x"))
    except redis.ResponseError as error:
        assert str(error).startswith("MISCONF"), error
        return False
