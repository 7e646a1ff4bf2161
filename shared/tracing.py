"""Traces by OpenTelemetry, if somebody wants them (`--otlp-traces-endpoint`): nothing of it is imported otherwise.

A trace crosses the queue as the W3C `traceparent` of the request; the spans of the gateway and of the worker are then
those of one trace. Spans have OpenTelemetry's names for generative AI where there are such names.

It stands beside every walk, in both programs. It knows no request's content.
"""

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span

_TRACEPARENT = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")


class TracingUnavailable(Exception):
    """OpenTelemetry is not installed."""


def valid_traceparent(text: str) -> str:
    """`text`, or nothing if it is not one of W3C's version 00."""
    return text if _TRACEPARENT.fullmatch(text) else ""


class Tracing:
    def __init__(self, provider: "TracerProvider") -> None:
        from opentelemetry.trace.propagation.tracecontext import (  # noqa: PLC0415 - see the module's docstring
            TraceContextTextMapPropagator,
        )

        self._provider = provider
        self._tracer = provider.get_tracer("pagestream")
        self._propagator = TraceContextTextMapPropagator()

    def begin(self, name: str, parent: str) -> "Span":
        """`parent`: a traceparent, or nothing, which begins a trace. The caller ends the span."""
        from opentelemetry.trace import SpanKind  # noqa: PLC0415

        return self._tracer.start_span(name, self._context(parent), kind=SpanKind.SERVER)

    def record(self, name: str, parent: str, began: float, ended: float, attributes: dict[str, Any]) -> None:
        """A span that is over. Times in seconds since 1970."""
        span = self._tracer.start_span(name, self._context(parent), attributes=attributes, start_time=int(began * 1e9))
        span.end(int(ended * 1e9))

    def traceparent(self, span: "Span") -> str:
        from opentelemetry.trace import set_span_in_context  # noqa: PLC0415

        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, set_span_in_context(span))
        return carrier["traceparent"]

    def close(self) -> None:
        """Sends what has not been sent; waits a few seconds at most."""
        self._provider.shutdown()

    def _context(self, parent: str) -> "Context":
        return self._propagator.extract({"traceparent": parent})


def open_tracing(endpoint: str, service: str) -> Tracing | None:
    """None without an endpoint, which is one of OTLP over HTTP. Raises TracingUnavailable."""
    if not endpoint:
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter  # noqa: PLC0415
        from opentelemetry.sdk.resources import Resource  # noqa: PLC0415
        from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
        from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415
    except ImportError as error:
        raise TracingUnavailable(f"--otlp-traces-endpoint needs pip install 'pagestream[tracing]': {error}") from error
    provider = TracerProvider(resource=Resource.create({"service.name": service}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint)))
    return Tracing(provider)
