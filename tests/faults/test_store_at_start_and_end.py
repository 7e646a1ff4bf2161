"""An unusable store is refused at the start with one sentence; an unreachable store only delays a stop."""

import asyncio
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from tests.e2e.fleet import START_SECONDS, STOP_SECONDS, Fleet, running_fleet
from tests.faults.conftest import SCRIPT, StartWorld, Store, World
from tests.patience import PATIENCE_SECONDS

EXIT_CANNOT_START = 2


@pytest.fixture
def other_store(store: Store, tmp_path: Path) -> Iterator[Store]:
    """Return a store that is not started."""
    directory = tmp_path / "other"
    directory.mkdir()
    other = Store(directory)
    yield other
    if other.process is not None:
        other.kill()


async def ends_with(fleet: Fleet, url: str, model: Path, sentence: str) -> None:
    """Check that a worker and a gateway at this store end with the sentence."""
    common = ["--redis-url", url, "--served-model-name", "m"]
    worker = ["--model", "/none", "--metrics-port", "0", "--worker-id", "w0"]
    processes = {
        "w0": fleet.start("w0", SCRIPT, *worker, *common, PYTHONPATH="."),
        "g0": fleet.start("g0", "-m", "gateway", "--model", str(model), "--port", "0", *common, PYTHONPATH="."),
    }
    for name, process in processes.items():
        status = await asyncio.to_thread(process.wait, START_SECONDS)
        log = fleet.log(name)
        assert status == EXIT_CANNOT_START, log
        assert sentence in log and "Traceback" not in log, log


@pytest.mark.long
async def test_replica_at_start_is_refused(
    store: Store, other_store: Store, demo_model_dir: Path, tmp_path: Path
) -> None:
    other_store.start()
    with other_store.client() as client:
        client.replicaof("127.0.0.1", store.port)
    with running_fleet(tmp_path / "logs") as fleet:
        sentence = "the store is a read-only replica; give the address of the primary"
        await ends_with(fleet, other_store.url, demo_model_dir, sentence)


@pytest.mark.long
async def test_cluster_node_at_start_is_refused(tmp_path: Path, demo_model_dir: Path) -> None:
    first, second = (cluster_node(tmp_path / name) for name in ("first", "second"))
    try:
        with first.client() as client, second.client() as other:
            client.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
            client.execute_command("CLUSTER", "MEET", "127.0.0.1", second.port)
            await until_moved(other)
        with running_fleet(tmp_path / "logs") as fleet:
            await ends_with(fleet, second.url, demo_model_dir, "the store is a node of a cluster")
    finally:
        for node in (first, second):
            node.kill()


def cluster_node(directory: Path) -> Store:
    directory.mkdir()
    node = Store(directory, append_only=False, options=["--cluster-enabled", "yes", "--cluster-port", "0"])
    node.start()
    return node


async def until_moved(client: redis.Redis) -> None:
    async with asyncio.timeout(START_SECONDS):
        while True:
            try:
                client.get("x")
            except redis.exceptions.MovedError:
                return
            except redis.RedisError:
                await asyncio.sleep(0.05)


async def drained_without_store(start_world: StartWorld, drain_seconds: int) -> "tuple[World, subprocess.Popen[bytes]]":
    """Return a worker that holds a request and has received SIGTERM while the store is away."""
    world = await start_world()
    worker = world.start_worker("w0", "--script-step-seconds", "0.02", "--drain-seconds", str(drain_seconds))
    (reader,) = readers = world.read(1, max_tokens=1900)
    await world.all_have(readers, 5)
    world.store.kill()
    worker.send_signal(signal.SIGTERM)
    await world.logged("w0", "step: not stored")
    reader.finished.cancel()
    return world, worker


async def test_worker_ends_when_the_store_is_back(start_world: StartWorld) -> None:
    world, worker = await drained_without_store(start_world, drain_seconds=2)
    await asyncio.sleep(3)  # the drain is over, and the hand-over begins
    world.store.start()
    assert await asyncio.to_thread(worker.wait, STOP_SECONDS) == 0
    assert await world.connections.commands.xlen(world.keys.queue("resumed")) == 1


@pytest.mark.long
async def test_worker_ends_when_the_store_stays_away(start_world: StartWorld) -> None:
    world, worker = await drained_without_store(start_world, drain_seconds=1)
    assert await asyncio.to_thread(worker.wait, STOP_SECONDS) == 0
    world.store.start()


async def test_worker_that_never_had_a_store_ends(start_world: StartWorld) -> None:
    world = await start_world()
    world.store.kill()
    worker = world.start_worker("w0")
    await world.logged("w0", "register: store error")
    worker.send_signal(signal.SIGTERM)
    assert await asyncio.to_thread(worker.wait, PATIENCE_SECONDS) == 0
    world.store.start()
