"""OpenTelemetry traces, enabled by `--otlp-traces-endpoint`. Nothing is imported otherwise.

The W3C `traceparent` of a request is stored with it, so the spans of gateway and worker belong to one trace. Names
follow OpenTelemetry's conventions for generative AI. Spans contain no content of requests.
"""

import re
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span

_TRACEPARENT = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")


class TracingUnavailable(Exception):
    """OpenTelemetry is not installed."""


def collector_url(text: str) -> str:
    """Return the URL of a collector as it is, or an empty string for none.

    Raises:
        ValueError: If it is no http:// or https:// URL of a host.
    """
    url = urlsplit(text)
    if text and (url.scheme not in ("http", "https") or not url.hostname):
        raise ValueError(f"expected a URL such as http://HOST:4318/v1/traces; got {text!r}")
    return text


def valid_traceparent(text: str) -> str:
    """Return `text` if it is a W3C traceparent of version 00, else an empty string."""
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
        """Start a span, which the caller ends. `parent` is a traceparent, or empty to start a trace."""
        from opentelemetry.trace import SpanKind  # noqa: PLC0415

        return self._tracer.start_span(name, self._context(parent), kind=SpanKind.SERVER)

    def record(self, name: str, parent: str, began: float, ended: float, attributes: dict[str, Any]) -> None:
        """Record a completed span. Times are in seconds since 1970."""
        span = self._tracer.start_span(name, self._context(parent), attributes=attributes, start_time=int(began * 1e9))
        span.end(int(ended * 1e9))

    def traceparent(self, span: "Span") -> str:
        from opentelemetry.trace import set_span_in_context  # noqa: PLC0415

        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, set_span_in_context(span))
        return carrier["traceparent"]

    def close(self) -> None:
        """Send remaining spans; waits a few seconds at most."""
        self._provider.shutdown()

    def _context(self, parent: str) -> "Context":
        return self._propagator.extract({"traceparent": parent})


def open_tracing(endpoint: str, service: str) -> Tracing | None:
    """Return the tracing of a service, or None without an endpoint.

    Args:
        endpoint: URL of an OTLP collector over HTTP.
        service: Name of the service.

    Raises:
        TracingUnavailable: If OpenTelemetry is not installed.
    """
    if not endpoint:
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter  # noqa: PLC0415
        from opentelemetry.sdk.resources import Resource  # noqa: PLC0415
        from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
        from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415
    except ImportError as error:
        raise TracingUnavailable(
            f"--otlp-traces-endpoint: run pip install 'pagestream[tracing]' first: {error}"
        ) from error
    provider = TracerProvider(resource=Resource.create({"service.name": service}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint)))
    return Tracing(provider)
