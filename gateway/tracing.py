"""The trace of an HTTP request: its client's, or one that begins here, handed on to the worker with the request."""

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from shared.tracing import Tracing, valid_traceparent

_TRACEPARENT = web.RequestKey("traceparent", str)


def trace(tracing: Tracing | None) -> Middleware:
    """Without `tracing` a client's traceparent is handed on as it came, for workers that trace."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        parent = valid_traceparent(request.headers.get("traceparent", ""))
        request[_TRACEPARENT] = parent
        if tracing is None or request.method != "POST":  # probes, scrapes and the page would fill any store of traces
            return await handler(request)
        span = tracing.begin("gateway", parent)
        request[_TRACEPARENT] = tracing.traceparent(span)
        try:
            span.set_attribute("http.request.method", request.method)
            span.set_attribute("url.path", request.path[:200])
            response = await handler(request)
            span.set_attribute("http.response.status_code", response.status)
            return response
        finally:
            span.end()

    return middleware


def traceparent_of(request: web.Request) -> str:
    return request[_TRACEPARENT]
