"""Trace spans of a request in gateway, queue, and worker: parents, names, and order; none without a traceparent."""

from typing import Any

import pytest
from msgspec import structs
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from engine_worker.request_spans import RequestSpans
from engine_worker.request_times import RequestClock
from shared.redis_client import RedisConnections
from shared.redis_keys import RedisKeys
from shared.tracing import Tracing, open_tracing, valid_traceparent
from tests.builders import make_request
from tests.engine_worker.worker_harness import WorkerHarness

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
CLIENT = f"00-{TRACE_ID}-00f067aa0ba902b7-01"


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def tracing(exporter: InMemorySpanExporter) -> Tracing:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return Tracing(provider)


def trace_id(span: ReadableSpan) -> str:
    return f"{span.context.trace_id:032x}"


async def test_spans_worker_joins_the_request_trace(
    connections: RedisConnections, keys: RedisKeys, tracing: Tracing, exporter: InMemorySpanExporter
) -> None:
    gateway = tracing.begin("gateway", CLIENT)
    request = make_request(5, max_tokens=4, ignore_eos=True)
    request = structs.replace(request, traceparent=tracing.traceparent(gateway))
    untraced = make_request(5, max_tokens=4, ignore_eos=True)
    clock = RequestClock([RequestSpans(tracing, "w", "m")])
    async with WorkerHarness(connections, keys, clock=clock).serving() as harness:
        for one in (request, untraced):
            await harness.submit(one)
            await harness.finish(one.request_id)
    gateway.end()
    spans: dict[str, Any] = {span.name: span for span in exporter.get_finished_spans()}
    assert spans.keys() == {"gateway", "queue", "prefill", "decode"}
    assert len(exporter.get_finished_spans()) == 4  # none for the request without a trace
    assert {trace_id(span) for span in spans.values()} == {TRACE_ID}
    assert f"{spans['gateway'].parent.span_id:016x}" == CLIENT.split("-")[2]
    for part in ("queue", "prefill", "decode"):
        assert spans[part].parent.span_id == spans["gateway"].context.span_id
    assert spans["queue"].end_time == spans["prefill"].start_time
    assert spans["prefill"].end_time == spans["decode"].start_time <= spans["decode"].end_time
    assert spans["decode"].attributes["reason"] == "length"


@pytest.mark.parametrize(
    "text", ["", "x", CLIENT.upper(), f"00-{'0' * 32}-00f067aa0ba902b7-01", CLIENT + "-x", "01" + CLIENT[2:]]
)
def test_traceparent_invalid_is_dropped(text: str) -> None:
    assert valid_traceparent(text) == ""


def test_traceparent_valid_is_unchanged() -> None:
    assert valid_traceparent(CLIENT) == CLIENT


def test_tracing_without_endpoint_is_off() -> None:
    assert open_tracing("", "x") is None
