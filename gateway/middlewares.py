"""The aiohttp middlewares of every route: request id, duration, trace, charge, admission, and error objects.

Every route is charged to the account of its key before its body is read, except for UNCHARGED ones. A refused request
costs nothing; an admitted one counts as a request even if it ends in an error. A trace is the client's, or starts here;
the request carries it to the worker.
"""

import logging
import re
import secrets
import time
from functools import partial
from types import MappingProxyType

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from gateway.apis.anthropic.format import ANTHROPIC_ID_HEADER, anthropic_error, anthropic_id, speaks_anthropic
from gateway.auth.access import ACCOUNT, OPEN_ROUTES
from gateway.errors import BodyTooLarge, GatewayError, InternalError, InvalidRequest, MethodNotAllowed, UnknownUrl
from gateway.http.headers import NAME_HEADER
from gateway.http.long_body import write_long
from gateway.http.routing import UNKNOWN_ROUTE, route_name
from gateway.http.state import STATE, TRACEPARENT
from gateway.metrics import GatewayMetrics
from shared.logs import request_id as log_request_id
from shared.tracing import Tracing, valid_traceparent

logger = logging.getLogger("gateway")
REQUEST_ID_HEADER = "x-request-id"
_REQUEST_ID = web.RequestKey("request_id", str)
_SAFE_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"))  # all others share one label
_CLIENT_GONE = "499"
GENERATING = frozenset(("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"))  # by POST


def trace(tracing: Tracing | None) -> Middleware:
    """Return the middleware that starts a span. Without `tracing` it passes a valid client traceparent to workers."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get("traceparent")
        parent = valid_traceparent(given) if given else ""
        request[TRACEPARENT] = parent
        if tracing is None or request.method != "POST":  # no spans for probes, scrapes, and the web page
            return await handler(request)
        span = tracing.begin("gateway", parent)
        request[TRACEPARENT] = tracing.traceparent(span)
        try:
            span.set_attribute("http.request.method", request.method)
            span.set_attribute("url.path", request.path[:200])
            response = await handler(request)
            span.set_attribute("http.response.status_code", response.status)
            return response
        finally:
            span.end()

    return middleware


@web.middleware
async def identify(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Set the request id: the client's x-request-id, if valid, or a random one. It is used only in logs and replies."""
    given = request.headers.get(REQUEST_ID_HEADER, "")
    request[_REQUEST_ID] = given if _SAFE_REQUEST_ID.fullmatch(given) else secrets.token_hex(16)
    token = log_request_id.set(request[_REQUEST_ID])
    try:
        return await handler(request)
    finally:
        log_request_id.reset(token)


async def set_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Set the headers of every response, in on_response_prepare: a stream sends them before its handler returns."""
    response.headers["Server"] = "pagestream"  # aiohttp's default reveals its and Python's version
    if _REQUEST_ID in request:
        response.headers[REQUEST_ID_HEADER] = request[_REQUEST_ID]
        if speaks_anthropic(request):
            response.headers[ANTHROPIC_ID_HEADER] = anthropic_id(request[_REQUEST_ID])


def measure(metrics: GatewayMetrics) -> Middleware:
    """Return the middleware that records and logs the duration of each request."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        started_at = time.monotonic()
        code = _CLIENT_GONE  # stays if the handler is cancelled or its writes fail
        try:
            response = await handler(request)
            code = str(response.status)
            return response
        except web.HTTPException as redirect:
            code = str(redirect.status)
            raise
        finally:
            seconds = time.monotonic() - started_at
            if code == _CLIENT_GONE:
                metrics.disconnects.inc()
            route = route_name(request)
            method = request.method if request.method in _METHODS else "other"
            metrics.http_duration.labels(route, method, code).observe(seconds)
            level = logging.INFO if request.method == "POST" else logging.DEBUG  # DEBUG for probes and scrapes
            logger.log(level, "%s %s %s", method, route, code, extra={"seconds": round(seconds, 3)})

    return middleware


@web.middleware
async def errors_to_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn exceptions into error objects in the format of the client's API."""
    try:
        return await handler(request)
    except GatewayError as error:
        return error_response(error, request)
    except ConnectionResetError:
        raise
    except web.HTTPException as error:
        if error.status < 400:
            raise  # a redirect
        return error_response(_of_aiohttp(request, error), request)
    except Exception:
        logger.exception("unexpected error")  # log only: its text may contain paths and addresses
        return error_response(InternalError(), request)


def error_response(error: GatewayError, request: web.Request) -> web.Response:
    """Return the response of an error, in the format of the client's API."""
    body = anthropic_error(error, request[_REQUEST_ID]) if speaks_anthropic(request) else error.body()
    return web.json_response(body, status=error.status, headers=error.headers())


def _of_aiohttp(request: web.Request, error: web.HTTPException) -> GatewayError:
    if isinstance(error, web.HTTPMethodNotAllowed):
        allowed = ", ".join(sorted(error.allowed_methods))
        return MethodNotAllowed(f"{request.method} is not allowed for this URL. Allowed: {allowed}.", allowed=allowed)
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        return BodyTooLarge("The request body is too large.")
    if error.status == UnknownUrl.status:
        return UnknownUrl(f"Unknown request URL: {request.method} {request.path[:200]}.")
    return InvalidRequest(error.reason)


# By route pattern, with the reason.
UNCHARGED = MappingProxyType(
    dict.fromkeys(OPEN_ROUTES, "probes have no key")
    | dict.fromkeys(("/health", "/ready", "/metrics", "/version"), "operators need them when a key has no budget left")
    | dict.fromkeys(("/v1/models", "/v1/models/{id}", "/models", "/models/{id}"), "names from memory")
    | dict.fromkeys(("/openapi.json", "/", "/ui/{name}"), "static bytes")
    | dict.fromkeys(("/v1/embeddings", UNKNOWN_ROUTE), "refused without reading the body")
)


@web.middleware
async def charge(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Charge a request to its account. Raises RateLimited."""
    route = route_name(request)
    if route in UNCHARGED:
        return await handler(request)
    # A request with an Idempotency-Key may read a stored answer, which a key in debt is allowed to do.
    generates = request.method == "POST" and route in GENERATING and NAME_HEADER not in request.headers
    request[ACCOUNT].begin(generates=generates)
    return await handler(request)


# New answers, attaches, and reads of stored answers: streams, or bodies as long as a stream.
ADMITTED = GENERATING | {"/v1/responses/compact", "/v1/requests/{id}", "/v1/requests/{id}/events", "/v1/responses/{id}"}


@web.middleware
async def admit(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Admit a request before its body is read; DELETE is always admitted, because it frees room.

    Raises GatewayError.
    """
    route = route_name(request)
    if route not in ADMITTED or request.method == "DELETE":
        return await handler(request)
    with request.app[STATE].open_requests.admit(route, request[ACCOUNT]):
        return await handler(request)


@web.middleware
async def write_out(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Write a long body before the request ends, while its bytes count toward the key's share."""
    state = request.app[STATE]
    return await write_long(request, await handler(request), state.watch, partial(state.hold_bytes, request))
