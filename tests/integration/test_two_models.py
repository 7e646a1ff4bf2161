"""Two models behind one gateway on a real store. Each has a queue and a worker that steps when the test allows it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from prometheus_client import CollectorRegistry

from gateway.apis.registry import APIS
from gateway.app import RUNNER_OPTIONS, create_app
from gateway.http.state import STATE
from gateway.metrics import GatewayMetrics
from gateway.model_service import model_options
from gateway.settings import GatewaySettings
from gateway.store.inference_client import InferenceClient
from shared.messages import WorkerHeartbeat, WorkerPhase, encode
from shared.models_file import ModelEntry, models_text
from shared.redis_client import RedisConnections, connect
from shared.redis_keys import RedisKeys
from shared.redis_scripts import RedisScripts
from tests.conftest import Valkey
from tests.engine_worker.worker_harness import FOREVER_STEPS, WorkerHarness
from tests.integration.conftest import COMPLETIONS, Gateway
from tests.patience import PATIENCE_SECONDS
from tests.tiny_model import VOCAB_SIZE, write_tiny_model

ANSWER = {"prompt": [5, 6], "max_tokens": 20, "ignore_eos": True, "temperature": 0}


class Deployment:
    def __init__(self, valkey: Valkey, keys: RedisKeys, directory: Path) -> None:
        self.names = [f"{keys.model_name}-a", f"{keys.model_name}-b"]
        self.workers: dict[str, WorkerHarness] = {}
        self._url = valkey.url
        self._num_gateways = 0
        model = write_tiny_model(directory / "tiny")
        self._models_file = directory / "models.toml"
        self._models_file.write_text(
            models_text(ModelEntry(model=str(model), names=(name, f"{name}-alias")) for name in self.names)
        )

    @asynccontextmanager
    async def connections(self) -> AsyncIterator[RedisConnections]:
        opened = connect(self._url)
        yield opened
        await opened.aclose()

    async def start_worker(self, stack: AsyncExitStack, name: str) -> None:
        connections = await stack.enter_async_context(self.connections())
        worker = WorkerHarness(connections, RedisKeys(name), num_steps=0, vocab_size=VOCAB_SIZE)
        self.workers[name] = await stack.enter_async_context(worker.serving())

    @asynccontextmanager
    async def gateway(self) -> AsyncIterator[Gateway]:
        self._num_gateways += 1
        settings = GatewaySettings(models_file=self._models_file)
        async with self.connections() as connections:
            clients = {
                options: InferenceClient(
                    connect(self._url), RedisKeys(options.name), f"g{self._num_gateways}", quiet_seconds=0.3
                )
                for options in model_options(settings)
            }
            app = create_app(settings, clients, APIS, GatewayMetrics(CollectorRegistry()))
            runner = web.AppRunner(app, shutdown_timeout=0.05, **RUNNER_OPTIONS)
            await runner.setup()
            try:
                await web.TCPSite(runner, "127.0.0.1", 0).start()
                host, port = runner.addresses[0][:2]
                async with aiohttp.ClientSession(f"http://{host}:{port}") as session:
                    await app[STATE].models_loaded.wait()
                    for service in app[STATE].models:
                        await _wait_for_worker(service.client, connections, RedisKeys(service.name))
                    options, first = next(iter(clients.items()))
                    scripts = RedisScripts(connections.commands, RedisKeys(options.name))
                    yield Gateway(app[STATE], first, session, scripts)
            finally:
                await runner.cleanup()


async def _wait_for_worker(client: InferenceClient, connections: RedisConnections, keys: RedisKeys) -> None:
    beat = encode(WorkerHeartbeat(worker_id="w.1", phase=WorkerPhase.READY))
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not client.fleet.snapshot():
            await connections.commands.publish(keys.heartbeat_channel, beat)
            await asyncio.sleep(0.01)


@pytest.fixture
async def deployment(valkey: Valkey, keys: RedisKeys, tmp_path: Path) -> AsyncIterator[Deployment]:
    async with AsyncExitStack() as stack:
        made = Deployment(valkey, keys, tmp_path)
        for name in made.names:
            await made.start_worker(stack, name)
        yield made


async def test_two_models_stalled_one_does_not_delay_the_other(deployment: Deployment) -> None:
    still, lively = deployment.names
    async with deployment.gateway() as gateway:
        waiting = asyncio.create_task(gateway.post(COMPLETIONS, {**ANSWER, "model": still}))
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not await deployment.workers[still].num_unacknowledged():
                await asyncio.sleep(0.01)
        assert await deployment.workers[lively].num_unacknowledged() == 0  # queued for its own model only
        deployment.workers[lively].gate.allow(FOREVER_STEPS)
        status, answer = await gateway.post(COMPLETIONS, {**ANSWER, "model": f"{lively}-alias"})
        assert (status, answer["model"], answer["usage"]["completion_tokens"]) == (200, lively, 20)
        assert not waiting.done()
        deployment.workers[still].gate.allow(FOREVER_STEPS)
        status, late = await waiting
        assert (status, late["model"], late["choices"][0]["text"]) == (200, still, answer["choices"][0]["text"])


async def test_two_models_retained_request_resumes_elsewhere(deployment: Deployment) -> None:
    async with deployment.gateway() as first, deployment.gateway() as second:
        for name in deployment.names:
            worker = deployment.workers[name]
            worker.gate.allow(10)
            async with first.streaming(COMPLETIONS, {**ANSWER, "model": name, "detach_seconds": 60}) as reader:
                begun = await reader.take(5)
            worker.gate.allow(FOREVER_STEPS)
            rest = await second.events(reader.request_id, begun[-1].event_id)
            text = "".join(event.chunk["choices"][0]["text"] for event in [*begun, *rest[:-2]])
            status, shown = await second.shown(reader.request_id)
            assert (status, shown["state"], shown["result"]["model"]) == (200, "finished", name)
            assert shown["result"]["choices"][0]["text"] == text
