"""A request's trace as a collector receives it from real processes: one trace through the gateway and each worker."""

import asyncio
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import Valkey
from tests.e2e.fleet import STOP_SECONDS, Answer, Fleet, connected, running_fleet
from tests.e2e.trace_collector import ReceivedSpan, TraceCollector, trace_collector
from tests.tiny_model import VOCAB_SIZE, write_tiny_model

MODEL = "tiny"
SCRIPT = str(Path(__file__).with_name("scripted_worker.py"))
TRACE_ID, CLIENT_SPAN_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
CLIENT = {"traceparent": f"00-{TRACE_ID}-{CLIENT_SPAN_ID}-01"}
EXPORT = {"OTEL_BSP_SCHEDULE_DELAY": "50"}  # milliseconds until the SDK exports its spans, instead of 5 s
SPANS_SECONDS = 100.0


class Stack:
    def __init__(self, directory: Path, valkey: Valkey, fleet: Fleet, collector: TraceCollector) -> None:
        self.fleet, self.collector = fleet, collector
        self._common = ["--model", str(write_tiny_model(directory / MODEL, 2048)), "--served-model-name", MODEL]
        self._common += ["--redis-url", valkey.url, "--otlp-traces-endpoint", collector.endpoint]
        fleet.start("gateway", "-m", "gateway", *self._common, "--port", str(fleet.port), **EXPORT)

    def start_worker(self, name: str) -> None:
        script = ["--script-vocab-size", str(VOCAB_SIZE), "--script-ignore-eos", "--script-step-seconds", "0.02"]
        flags = ["--worker-id", name, "--metrics-port", "0", "--drain-seconds", "0.05"]
        self.fleet.start(name, SCRIPT, *script, *self._common, *flags, PYTHONPATH=".", **EXPORT)

    async def spans(self, number: int) -> list[ReceivedSpan]:
        """Return the spans once there are `number` of them."""
        deadline = time.monotonic() + SPANS_SECONDS
        while len(self.collector.spans) < number:
            assert time.monotonic() < deadline, f"{self.collector.spans}\n{self.fleet.all_logs()}"
            await asyncio.sleep(0.02)  # polls spans that other processes send
        return list(self.collector.spans)


@pytest.fixture
def stack(tmp_path: Path, valkey: Valkey) -> Iterator[Stack]:
    with trace_collector() as collector, running_fleet(tmp_path / "logs") as fleet:
        yield Stack(tmp_path, valkey, fleet, collector)


async def complete(stack: Stack, answer: Answer, max_tokens: int) -> Answer:
    async with connected(f"http://127.0.0.1:{stack.fleet.port}", MODEL, headers=CLIENT) as api:
        await api.wait_until_ready(stack.fleet)
        return await api.complete(answer, "the end", max_tokens)


async def test_worker_spans_are_children_of_the_gateways_span(stack: Stack) -> None:
    stack.start_worker("w0")
    answer = Answer()
    asked = asyncio.create_task(complete(stack, answer, max_tokens=60))
    deadline = time.monotonic() + SPANS_SECONDS
    while not answer.pieces:
        assert time.monotonic() < deadline and not asked.done(), stack.fleet.all_logs()
        await asyncio.sleep(0.01)  # polls the stream that another task reads
    stack.start_worker("w1")
    stack.fleet.processes["w0"].send_signal(signal.SIGTERM)  # the worker hands the request back
    await asyncio.to_thread(stack.fleet.processes["w0"].wait, STOP_SECONDS)
    await asked
    spans = {(span.attributes.get("worker"), span.name): span for span in await stack.spans(6)}
    gateway = spans.pop((None, "gateway"))
    assert (gateway.service, gateway.parent_id) == ("pagestream-gateway", CLIENT_SPAN_ID)
    assert gateway.attributes["http.response.status_code"] == 200
    assert sorted(spans) == [("w0", "prefill"), ("w0", "queue"), ("w1", "decode"), ("w1", "prefill"), ("w1", "queue")]
    assert {(span.service, span.parent_id) for span in spans.values()} == {("pagestream-worker", gateway.span_id)}
    assert {span.trace_id for span in [gateway, *spans.values()]} == {TRACE_ID}
    queue, prefill, decode = (spans["w1", name] for name in ("queue", "prefill", "decode"))
    assert spans["w0", "prefill"].ended_nanoseconds <= queue.ended_nanoseconds == prefill.began_nanoseconds
    assert prefill.ended_nanoseconds == decode.began_nanoseconds <= decode.ended_nanoseconds
    assert decode.attributes["gen_ai.request.model"] == MODEL and decode.attributes["reason"] == "length"
    assert len(stack.collector.spans) == 6  # probes are not traced
