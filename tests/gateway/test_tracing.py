"""The gateway's span and the trace context that it sends to the engine."""

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry

from gateway.apis.registry import APIS
from gateway.app import RUNNER_OPTIONS, create_app
from gateway.auth.access import Access
from gateway.http.state import STATE
from gateway.metrics import GatewayMetrics
from gateway.model_service import model_options
from gateway.settings import GatewaySettings
from shared.tracing import Tracing
from tests.gateway.conftest import IM_END, Gateway
from tests.gateway.fake_inference import FakeInferenceClient, says

CLIENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
BODY = {"prompt": "the end", "max_tokens": 4}


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
async def traced(tiny_model_dir: Path, exporter: InMemorySpanExporter) -> AsyncIterator[Gateway]:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    engine = FakeInferenceClient(says([5, IM_END]))
    settings = replace(GatewaySettings(model=tiny_model_dir, port=0))
    clients = {model_options(settings)[0]: engine}
    app = create_app(settings, clients, APIS, GatewayMetrics(CollectorRegistry()), tracing=Tracing(provider))  # type: ignore[arg-type]
    runner = web.AppRunner(app, shutdown_timeout=0.5, **RUNNER_OPTIONS)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    port = runner.addresses[0][1]
    async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:
        await app[STATE].models_loaded.wait()
        yield Gateway(app, engine, session, port, Access())
    await runner.cleanup()


async def test_engine_gets_the_gateway_span_in_the_clients_trace(
    traced: Gateway, exporter: InMemorySpanExporter
) -> None:
    async with traced.session.post("/v1/completions", json=BODY, headers={"traceparent": CLIENT}) as reply:
        assert reply.status == 200
    async with traced.session.get("/ready"):
        pass
    (span,) = exporter.get_finished_spans()
    assert span.parent is not None and f"{span.parent.span_id:016x}" == "00f067aa0ba902b7"
    assert dict(span.attributes or {}) == {
        "http.request.method": "POST", "url.path": "/v1/completions", "http.response.status_code": 200,
    }  # fmt: skip
    (request,) = traced.engine.requests
    assert request.traceparent == f"00-4bf92f3577b34da6a3ce929d0e0e4736-{span.context.span_id:016x}-01"


@pytest.mark.parametrize(("header", "handed_on"), [(CLIENT, CLIENT), ("nonsense", "")])
async def test_client_trace_passes_through_without_tracing(gateway: Gateway, header: str, handed_on: str) -> None:
    gateway.engine.script = says([5, IM_END])
    async with gateway.session.post("/v1/completions", json=BODY, headers={"traceparent": header}) as reply:
        assert reply.status == 200
    (request,) = gateway.engine.requests
    assert request.traceparent == handed_on
