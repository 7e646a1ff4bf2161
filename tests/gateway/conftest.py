"""Fixtures: a gateway on a real port, with a fake engine and a model of a few words."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from aiohttp import web
from prometheus_client import CollectorRegistry

from gateway.apis.registry import APIS
from gateway.app import RUNNER_OPTIONS, create_app
from gateway.auth.access import Access
from gateway.batches.driver import driver
from gateway.batches.driver.app import create_app as create_driver_app
from gateway.http.routing import OPERATIONS, UNKNOWN_ROUTE
from gateway.http.state import STATE
from gateway.metrics import GatewayMetrics
from gateway.model_service import ModelService, model_options
from gateway.process import new_event_loop
from gateway.settings import GatewaySettings
from gateway.text.served_model import ServedModel, load_served_model
from gateway.work.reader_pool import ReaderPool
from tests.gateway.fake_inference import FakeInferenceClient
from tests.tiny_model import CHAT_TEMPLATE, END_OF_TEXT, IM_END, IM_START, MAX_MODEL_LEN, VOCAB_SIZE, write_tiny_model

# seconds until the tiny model is loaded
__all__ = ["CHAT_TEMPLATE", "END_OF_TEXT", "IM_END", "IM_START", "MAX_MODEL_LEN", "VOCAB_SIZE"]


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Run these tests on the event loop that the gateway uses."""
    return {"the gateway's": new_event_loop}


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def tiny_model(tiny_model_dir: Path) -> ServedModel:
    return load_served_model(tiny_model_dir)


class Driver:
    """A running batch driver, without its port."""

    def __init__(self, runner: web.AppRunner) -> None:
        self.state = runner.app[STATE]
        self._runner = runner
        self._is_running = True

    def metric(self, name: str, **labels: str) -> float | None:
        return self.state.metrics.registry.get_sample_value(name, labels)

    async def stop(self) -> None:
        """End it as SIGTERM does."""
        if self._is_running:
            self._is_running = False
            await self._runner.cleanup()


class Gateway:
    """A running gateway, its fake engine, a client, and with a directory of files a batch driver."""

    driver: Driver

    def __init__(
        self,
        app: web.Application,
        engine: FakeInferenceClient,
        session: aiohttp.ClientSession,
        port: int,
        access: Access,
    ) -> None:
        self.state = app[STATE]
        known = [route for route in app.router.routes() if route.name != UNKNOWN_ROUTE]
        self.routes = [(route.method, route.resource.canonical) for route in known if route.resource]
        self.operations = app[OPERATIONS].values()
        self.engine = engine
        self.session = session
        self.port = port
        self.access = access

    @property
    def service(self) -> ModelService:
        """Return the service of the only model."""
        (service,) = self.state.models
        return service

    def metric(self, name: str, **labels: str) -> float | None:
        """Return the value of a metric of the process or of the model."""
        sources = (self.state.metrics, self.service.metrics)
        values = [source.registry.get_sample_value(name, labels) for source in sources]
        return next((value for value in values if value is not None), None)


async def start_driver(settings: GatewaySettings, clients: Any) -> Driver:
    access = Access(settings.api_key, settings.api_keys_file)
    app = create_driver_app(settings, clients, GatewayMetrics(CollectorRegistry()), access)
    runner = web.AppRunner(app)
    await runner.setup()
    return Driver(runner)


@pytest.fixture
async def start_gateway(tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Callable[..., Any]]:
    monkeypatch.setattr(driver, "POLL_SECONDS", 0.05)  # between two looks for batches
    async with AsyncExitStack() as stack:

        async def start(
            *engines: FakeInferenceClient, wait: bool = True, readers: ReaderPool | None = None, **changes: Any
        ) -> Gateway:
            """Start a gateway with one engine per model: the tiny model, unless `models_file` names others."""
            model = None if "models_file" in changes else tiny_model_dir
            settings = GatewaySettings(**{"model": model, "port": 0, **changes})
            options = model_options(settings)
            engine, *others = engines or (FakeInferenceClient(),)
            clients = dict(zip(options, (engine, *others), strict=True))
            metrics = GatewayMetrics(CollectorRegistry(), vllm_names=settings.vllm_metric_names)
            access = Access(
                settings.api_key,
                settings.api_keys_file,
                allowed_hosts=settings.allowed_hosts,
                open_routes=settings.open_routes,
            )
            app = create_app(settings, clients, APIS, metrics, access, readers=readers)  # type: ignore[arg-type]
            runner = web.AppRunner(app, shutdown_timeout=0.5, **RUNNER_OPTIONS)
            await runner.setup()
            stack.push_async_callback(runner.cleanup)
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            host, port = runner.addresses[0][:2]
            session = await stack.enter_async_context(aiohttp.ClientSession(f"http://{host}:{port}"))
            gateway = Gateway(app, engine, session, port, access)
            if settings.files_dir is not None:
                gateway.driver = await start_driver(settings, clients)
                stack.push_async_callback(gateway.driver.stop)
            if wait:
                await gateway.state.models_loaded.wait()
            return gateway

        yield start


@pytest.fixture
async def gateway(start_gateway: Callable[..., Any]) -> Gateway:
    return await start_gateway()


@pytest.fixture
async def openai_client(gateway: Gateway) -> AsyncIterator[openai.AsyncOpenAI]:
    url = f"http://127.0.0.1:{gateway.port}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as opened:
        yield opened
