"""Two gateways and one worker on a real store, all in this process. The worker steps when the test allows it."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from prometheus_client import CollectorRegistry

from gateway.apis.registry import APIS
from gateway.app import RUNNER_OPTIONS, create_app
from gateway.http.state import STATE, GatewayState
from gateway.metrics import GatewayMetrics
from gateway.model_service import model_options
from gateway.settings import GatewaySettings
from gateway.store.acceptance import QueueRules
from gateway.store.inference_client import InferenceClient
from gateway.text.served_model import ServedModel, load_served_model
from shared.capabilities import SUPPORTED
from shared.messages import WorkerHeartbeat, WorkerPhase, encode
from shared.redis_client import RedisConnections
from shared.redis_keys import RedisKeys
from shared.redis_scripts import RedisScripts
from shared.tasks import cancel_and_wait
from tests.engine_worker.worker_harness import WorkerHarness
from tests.patience import PATIENCE_SECONDS

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
VOCAB_SIZE = 49_152  # of the demo model


@dataclass
class Event:
    """One server-sent event."""

    event_id: str
    data: str

    @property
    def chunk(self) -> dict[str, Any]:
        return json.loads(self.data)


@dataclass
class Gateway:
    state: GatewayState
    client: InferenceClient
    session: aiohttp.ClientSession
    scripts: RedisScripts  # of the client, so that tests can lose its replies
    keys: dict[str, str] = field(default_factory=dict)

    async def post(self, route: str, body: dict[str, Any], **headers: str) -> tuple[int, dict[str, Any]]:
        async with self.session.post(route, json=body, headers=_names(headers)) as reply:
            return reply.status, await reply.json()

    async def shown(self, request_id: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, Any]]:
        url = f"/v1/requests/{request_id}"
        async with self.session.request(method, url, headers=_names(headers)) as reply:
            return reply.status, await reply.json()

    @asynccontextmanager
    async def streaming(self, route: str, body: dict[str, Any], **headers: str) -> AsyncIterator["EventReader"]:
        async with self.session.post(route, json={**body, "stream": True}, headers=_names(headers)) as reply:
            assert reply.status == 200, await reply.text()
            yield EventReader(reply)

    async def events(self, request_id: str, last_event_id: str = "") -> list[Event]:
        """Return all events that a client with `last_event_id` still receives."""
        headers = {"Last-Event-ID": last_event_id} if last_event_id else {}
        async with self.session.get(f"/v1/requests/{request_id}/events", headers=headers) as reply:
            assert reply.status == 200, await reply.text()
            return await EventReader(reply).rest()


class EventReader:
    def __init__(self, reply: aiohttp.ClientResponse) -> None:
        self.reply = reply

    @property
    def request_id(self) -> str:
        return self.reply.headers["Content-Location"].rpartition("/")[2]

    async def next(self) -> Event | None:
        event_id = ""
        async with asyncio.timeout(PATIENCE_SECONDS):
            async for line in self.reply.content:
                name, _, value = line.decode().rstrip("\n").partition(": ")
                if name == "id":
                    event_id = value
                elif name == "data":
                    return Event(event_id, value)
        return None

    async def take(self, count: int) -> list[Event]:
        events = [await self.next() for _ in range(count)]
        assert None not in events
        return events  # type: ignore[return-value]

    async def rest(self) -> list[Event]:
        events = []
        while event := await self.next():
            events.append(event)
        return events


def _names(headers: dict[str, str]) -> dict[str, str]:
    return {name.replace("_", "-"): value for name, value in headers.items()}


@dataclass
class World:
    gateways: list[Gateway]
    worker: WorkerHarness
    connections: RedisConnections
    keys: RedisKeys

    @asynccontextmanager
    async def another_gateway(self, model: Path, **settings: Any) -> AsyncIterator[Gateway]:
        gateway_id = f"g{len(self.gateways)}"
        await self.connections.commands.set(self.keys.born, -3_600_000)  # a store that has lost nothing
        client = InferenceClient(
            self.connections,
            self.keys,
            gateway_id,
            queue_rules=QueueRules(settings.get("max_num_queued_reqs", 1024), settings.get("max_num_queued_tokens")),
            quiet_seconds=0.3,
            scripts=(scripts := RedisScripts(self.connections.commands, self.keys)),
        )
        options = GatewaySettings(model=model, served_model_name=(self.keys.model_name,), port=0, **settings)
        (served,) = model_options(options)
        app = create_app(options, {served: client}, APIS, GatewayMetrics(CollectorRegistry()))
        runner = web.AppRunner(app, shutdown_timeout=0.05, **RUNNER_OPTIONS)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        try:
            async with aiohttp.ClientSession(f"http://{host}:{port}") as session:
                gateway = Gateway(app[STATE], client, session, scripts=scripts)
                await app[STATE].models_loaded.wait()
                await self._wait_for_worker(gateway)
                self.gateways.append(gateway)
                yield gateway
        finally:
            await runner.cleanup()

    @asynccontextmanager
    async def beating(self) -> AsyncIterator[None]:
        """Publish heartbeats while the context is open. A worker counts as gone after ten seconds without one."""

        async def beat_on() -> None:
            while True:
                await self.beat()
                await asyncio.sleep(1.0)  # the heartbeat period

        task = asyncio.create_task(beat_on())
        yield
        await cancel_and_wait([task])

    async def beat(self) -> None:
        """Publish one heartbeat of the worker."""
        beat = encode(WorkerHeartbeat(worker_id="w.1", phase=WorkerPhase.READY, capabilities=SUPPORTED))
        await self.connections.commands.publish(self.keys.heartbeat_channel, beat)

    async def _wait_for_worker(self, gateway: Gateway) -> None:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not gateway.client.fleet.snapshot():
                await self.beat()
                await asyncio.sleep(0.01)


@pytest.fixture(scope="session")
def load_once() -> Callable[..., ServedModel]:
    """Cache the served model, because reading the demo's vocabulary takes 0.3 s per gateway."""
    return cache(load_served_model)


async def nothing_is_left(world: World) -> None:
    """No request is queued, claimed, or in the engine."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while await world.worker.num_unacknowledged() or world.worker.num_held:
            await asyncio.sleep(0.01)


@pytest.fixture
async def make_world(
    connections: RedisConnections,
    keys: RedisKeys,
    demo_model_dir: Path,
    load_once: Callable[..., ServedModel],
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[Callable[..., Awaitable[World]]]:
    monkeypatch.setattr("gateway.model_service.load_served_model", load_once)
    async with AsyncExitStack() as stack:

        async def make(**engine: Any) -> World:
            worker = WorkerHarness(connections, keys, num_steps=0, vocab_size=VOCAB_SIZE, **engine)
            world = World([], worker, connections, keys)
            for _ in range(2):
                await stack.enter_async_context(world.another_gateway(demo_model_dir))
            await stack.enter_async_context(worker.serving())
            await stack.enter_async_context(world.beating())
            return world

        yield make


@pytest.fixture
async def world(make_world: Callable[..., Awaitable[World]]) -> World:
    """Return two gateways and a worker that waits for `world.worker.gate.allow()`."""
    return await make_world()


@pytest.fixture
async def one_slot(make_world: Callable[..., Awaitable[World]]) -> World:
    """Return a world whose worker runs one request at a time."""
    return await make_world(max_num_seqs=1)
