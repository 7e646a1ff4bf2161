"""A whole system of real processes that can be killed and restarted: store, gateways, scripted workers."""

import asyncio
import signal
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.serving.free_port import free_port
from shared.messages import WorkerHeartbeat, decode_heartbeat
from shared.redis_client import connect
from shared.redis_keys import GROUP, RedisKeys
from shared.subscription import Message, Subscription
from tests.e2e.fleet import STOP_SECONDS, Fleet, connected, running_fleet
from tests.faults.conftest import SCRIPT, Store
from tests.faults.store_site import StoreSite
from tests.faults.tcp_proxy import TcpProxy

MODEL = "m"
ROOT = Path(__file__).parents[2]
NUM_GATEWAYS = 2
LEFTOVER_SECONDS = 100.0


@dataclass
class Site:
    store: Store  # not started if `store_url` names another one
    fleet: Fleet
    model: Path  # model directory, for the tokenizer
    worker_flags: list[str]
    gateway_flags: list[str] = field(default_factory=list)
    name: str = MODEL
    worker_program: list[str] = field(default_factory=lambda: [SCRIPT, "--model", "/none"])
    environs: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # by process name: g0, w0, ...
    store_url: str = ""  # of a store other than `store`
    stores: StoreSite | None = None  # that store, if it fails over
    proxies: dict[str, TcpProxy] = field(default_factory=dict)  # in front of the store, by process name
    ports: dict[str, int] = field(default_factory=dict)  # ports of gateways, by name
    _num_workers: int = 0

    @property
    def keys(self) -> RedisKeys:
        return RedisKeys(self.name)

    @property
    def url_of_store(self) -> str:
        return self.store_url or self.store.url

    @property
    def urls(self) -> list[str]:
        return [f"http://127.0.0.1:{port}" for port in self.ports.values()]

    @property
    def worker_names(self) -> list[str]:
        return [name for name, process in self.fleet.processes.items() if name[0] == "w" and process.poll() is None]

    async def cut_from_store(self, seconds: float) -> None:
        """Let the proxies of all processes accept and close connections, as proxies do while their store is away."""
        for proxy in self.proxies.values():
            proxy.is_down = True
            proxy.cut()
        await asyncio.sleep(seconds)  # length of the fault
        for proxy in self.proxies.values():
            proxy.is_down = False

    def start_gateway(self, name: str) -> None:
        port = self.ports.setdefault(name, free_port())
        argv = [
            "-m",
            "gateway",
            *self._common(name),
            "--model",
            str(self.model),
            "--port",
            str(port),
            *self.gateway_flags,
        ]
        self.fleet.start(name, *argv, **self._environ(name))

    def start_worker(self) -> str:
        """Start a worker with a name that no worker had before."""
        name = f"w{self._num_workers}"
        self._num_workers += 1
        argv = [
            *self.worker_program,
            *self._common(name),
            "--metrics-port",
            "0",
            "--worker-id",
            name,
            *self.worker_flags,
        ]
        self.fleet.start(name, *argv, **self._environ(name))
        return name

    async def ready(self, num_workers: int) -> None:
        for url in self.urls:
            async with connected(url, self.name) as api:
                await api.wait_until_ready(self.fleet, num_workers)

    async def end(self, name: str, number: signal.Signals = signal.SIGTERM) -> int:
        process = self.fleet.processes.pop(name)  # the remaining processes are expected to live
        process.send_signal(number)
        return await asyncio.to_thread(process.wait, STOP_SECONDS)

    async def nothing_is_left(self) -> None:
        """Wait until queues and pending lists are empty and every block of every worker is free."""
        connections = connect(self.url_of_store, hash_tag=self.keys.hash_tag)
        subscription = Subscription(connections.subscriber, [self.keys.heartbeat_channel])
        beats: dict[str, WorkerHeartbeat] = {}
        try:
            async with asyncio.timeout(LEFTOVER_SECONDS):
                while len(beats) < len(self.worker_names) or not all(map(_is_idle, beats.values())):
                    message = await subscription.get(1.0)
                    if isinstance(message, Message):
                        beat = decode_heartbeat(message.data)
                        beats[beat.worker_id.split(".")[0]] = beat
                        beats = {name: beat for name, beat in beats.items() if name in self.worker_names}
            for queue in self.keys.queues:
                assert await connections.commands.xlen(queue) == 0
                assert (await connections.commands.xpending(queue, GROUP))["pending"] == 0
        except TimeoutError:
            raise AssertionError(f"something is left: {beats}") from None
        finally:
            await subscription.aclose()
            await connections.aclose()

    def _environ(self, name: str) -> dict[str, str]:
        return {"PYTHONPATH": str(ROOT), **self.environs.get(name, {})}

    def _common(self, name: str) -> list[str]:
        url = self.url_of_store
        if (proxy := self.proxies.get(name)) is not None:
            url = f"redis://127.0.0.1:{proxy.port}/0"
        return ["--served-model-name", self.name, "--redis-url", url]


def _is_idle(beat: WorkerHeartbeat) -> bool:
    return not beat.running and not beat.waiting and beat.kv_blocks_free == beat.kv_blocks_total > 0


@asynccontextmanager
async def running_site(
    directory: Path,
    model: Path,
    *,
    num_workers: int,
    worker_flags: list[str],
    environs: Mapping[str, Mapping[str, str]] | None = None,
    are_gateways_behind_proxies: bool = False,
    store_url: str = "",
    stores: StoreSite | None = None,
    **options: Any,
) -> AsyncIterator[Site]:
    """Run a site; `environs` are those of a Site, and of "store"; `options` are further fields of a Site."""
    environs = environs or {}
    store_url = stores.url if stores is not None else store_url
    (directory / "store").mkdir()
    store = Store(directory / "store", append_fsync="everysec", environ={**environs.get("store", {})})
    names = [f"g{number}" for number in range(NUM_GATEWAYS)]
    async with AsyncExitStack() as stack:
        if not store_url:
            store.start()
            stack.callback(store.kill)
        proxies = {}
        if are_gateways_behind_proxies:
            for name in names:
                proxies[name] = await stack.enter_async_context(
                    TcpProxy("127.0.0.1", stores.port if stores else store.port)
                )
        fleet = stack.enter_context(running_fleet(directory / "logs"))
        site = Site(
            store, fleet, model, worker_flags,
            environs=environs, store_url=store_url, stores=stores, proxies=proxies, **options,
        )  # fmt: skip
        for name in names:
            site.start_gateway(name)
        for _ in range(num_workers):
            site.start_worker()
        await site.ready(num_workers)
        yield site
