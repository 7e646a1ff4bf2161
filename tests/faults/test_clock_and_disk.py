"""The wall clock jumps, or the disk is full, for every process of the machine at once."""

import asyncio
import os
import random
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest
import redis
from tokenizers import Tokenizer

from gateway.store.store_calls import StoreUnavailable
from tests.builders import make_request
from tests.e2e.fleet import STOP_SECONDS
from tests.e2e.reader import Reader
from tests.faults.conftest import StartWorld, Store, World
from tests.faults.mixed_requests import RequestMix
from tests.faults.site import MODEL, Site, running_site
from tests.faults.stream_client import StreamClient
from tests.patience import PATIENCE_SECONDS

SOURCE = Path(__file__).with_name("jumping_clock.c")
HOUR_SECONDS = 3600
SEED = 3


class JumpingClock:
    """The wall clock of a process that is started with `environ`."""

    def __init__(self, library: Path, offset: Path) -> None:
        self._file = offset
        self._file.write_bytes(bytes(8))
        self.environ = {"LD_PRELOAD": str(library), "JUMPING_CLOCK": str(offset)}

    def jump_to(self, offset_seconds: int) -> None:
        with self._file.open("r+b") as file:  # it is mapped into memory, so the file must not be replaced
            file.write(offset_seconds.to_bytes(8, "little", signed=True))


@pytest.fixture
def clocks(tmp_path: Path) -> dict[str, JumpingClock]:
    if shutil.which("gcc") is None:
        pytest.skip("the clock is bent by a library that gcc builds")
    library = tmp_path / "jumping_clock.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-o", str(library), str(SOURCE)], check=True)
    return {name: JumpingClock(library, tmp_path / f"{name}.clock") for name in ("store", "g0", "g1", "w0", "w1")}


async def test_wall_clock_jumps_change_no_answer(
    clocks: dict[str, JumpingClock], demo_model_dir: Path, tmp_path: Path
) -> None:
    """The clock jumps forward and back, process by process and then for all, while streams run.

    Nothing is reaped, no limit expires, no stream breaks, because only monotonic clocks and ticks decide.
    """
    environs = {name: clock.environ for name, clock in clocks.items()}
    tokenizer = Tokenizer.from_file(str(demo_model_dir / "tokenizer.json"))
    mix = RequestMix(random.Random(SEED), tokenizer, MODEL, max_tokens=60)
    flags = ["--script-step-seconds", "0.02"]
    async with running_site(tmp_path, demo_model_dir, num_workers=2, worker_flags=flags, environs=environs) as site:
        jumped = asyncio.create_task(jump(site, clocks))
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as session:
            client = StreamClient(session, site.urls, random.Random(SEED))
            await asyncio.gather(*(ask_on(client, mix, jumped) for _ in range(6)))
        await jumped
        logs = site.fleet.all_logs()
        assert "reaped" not in logs and ": fenced" not in logs and ": ended" not in logs
        await site.nothing_is_left()


async def ask_on(client: StreamClient, mix: RequestMix, until: "asyncio.Task[None]") -> None:
    while not until.done():
        request = mix.draw()
        answer = await client.complete({**request.body, "timeout_seconds": 300, "queue_timeout_seconds": 200})
        assert request.difference(answer) == ""
        assert (answer.num_resumes, answer.num_refusals) == (0, 0)


async def jump(site: Site, clocks: dict[str, JumpingClock]) -> None:
    for together in [*([clock] for clock in clocks.values()), list(clocks.values())]:
        for offset_seconds in (HOUR_SECONDS, -HOUR_SECONDS, 0):
            for clock in together:
                clock.jump_to(offset_seconds)
            if clocks["store"] in together:
                await store_shows(site.store, offset_seconds)
            await asyncio.sleep(0.5)  # length of the fault: several ticks of every process


async def store_shows(store: Store, offset_seconds: int) -> None:
    """Return the store's time; it reads its clock once per event loop iteration, not for each command."""
    with store.client() as client:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while abs(client.time()[0] - time.time() - offset_seconds) > 60:
                await asyncio.sleep(0.02)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Return a disk of 2 MB."""
    directory = tmp_path / "disk"
    directory.mkdir()
    options = ["-t", "tmpfs", "-o", "size=2m", "tmpfs", str(directory)]
    if os.geteuid() != 0 or subprocess.run(["mount", *options], check=False, capture_output=True).returncode != 0:
        pytest.skip("a small disk is mounted by root alone")
    yield directory
    subprocess.run(["umount", "--lazy", str(directory)], check=True)


async def streams_until_it_is_full(
    start_world: StartWorld, store: Store, small_disk: Path, append_fsync: str
) -> tuple[World, list[Reader], Path]:
    """Return running streams, and the file that fills the disk."""
    store.kill()
    store.directory, store.append_fsync = small_disk, append_fsync
    store.start()
    world = await start_world()
    world.start_worker("w0", "--script-step-seconds", "0.02")
    readers = world.read(4, max_tokens=200)
    await world.all_have(readers, 20)
    return world, readers, fill(small_disk)


async def test_full_store_disk_holds_steps_until_there_is_room(
    start_world: StartWorld, store: Store, small_disk: Path
) -> None:
    """The store refuses every write. New requests are refused; workers hold their step until there is room."""
    world, readers, ballast = await streams_until_it_is_full(start_world, store, small_disk, "everysec")
    with store.client() as client:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while await asyncio.to_thread(takes_writes, client):
                await asyncio.sleep(0.05)
        with pytest.raises(StoreUnavailable):
            await world.client.submission.submit(make_request(5))
        with pytest.raises(StoreUnavailable):  # the probe of /readyz
            await world.client.probe.write_seconds()
        assert not any(reader.finished.done() for reader in readers)
        ballast.unlink()
    await world.all_complete(readers)
    assert await world.attempts(readers) == [1] * len(readers)
    await world.nothing_is_left()


async def test_syncing_store_ends_on_a_full_disk_and_loses_nothing(
    start_world: StartWorld, store: Store, small_disk: Path
) -> None:
    """It cannot keep what it has acknowledged, so it ends itself; restarted with room it has every token."""
    world, readers, ballast = await streams_until_it_is_full(start_world, store, small_disk, "always")
    assert store.process is not None
    assert await asyncio.to_thread(store.process.wait, STOP_SECONDS) == 1
    with pytest.raises(StoreUnavailable):
        await world.client.submission.submit(make_request(5))
    ballast.unlink()
    store.start()
    await world.all_complete(readers)
    await world.nothing_is_left()


def fill(disk: Path) -> Path:
    """Fill the disk to its last block, and return the file that does so."""
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        while True:
            file.write(bytes(4096))
    return ballast


def takes_writes(client: redis.Redis) -> bool:
    try:
        return bool(client.set("filler", "x"))
    except redis.ResponseError as error:
        assert str(error).startswith("MISCONF"), error
        return False
