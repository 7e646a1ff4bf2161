"""The aiohttp middlewares of every route: request id, duration, trace, charge, admission, and error objects.

A request is charged to the account of its key before its body is read (Operation.uncharged). A refused one costs
nothing; an admitted one counts as a request even if it ends in an error. A trace is the client's, or starts here;
the request carries it to the worker.
"""

import logging
import re
import secrets
import time
from functools import partial

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from gateway.auth.access import ACCOUNT
from gateway.errors import BodyTooLarge, GatewayError, InternalError, InvalidRequest, MethodNotAllowed, UnknownUrl
from gateway.http.dialect import dialect_of
from gateway.http.headers import NAME_HEADER
from gateway.http.long_body import write_long
from gateway.http.request_log import RequestLog
from gateway.http.routing import operation_of, route_name
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
        if (dialect := dialect_of(request)) is not None:
            response.headers.update(dialect.headers(request[_REQUEST_ID]))


def measure(metrics: GatewayMetrics) -> Middleware:
    """Return the middleware that records and logs the duration of each request."""
    log = RequestLog()

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
        except ConnectionResetError:
            # Nobody reads it. Raised further, the error and aiohttp's frames would hold each other and the request.
            return web.Response()
        finally:
            seconds = time.monotonic() - started_at
            if code == _CLIENT_GONE:
                metrics.disconnects.inc()
            route = route_name(request)
            method = request.method if request.method in _METHODS else "other"
            metrics.http_duration.labels(route, method, code).observe(seconds)
            log.write(method, route, code, seconds)

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
    dialect = dialect_of(request)
    body = error.body() if dialect is None else dialect.error(error, request[_REQUEST_ID])
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


@web.middleware
async def charge(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Charge a request to its account. Raises RateLimited."""
    operation = operation_of(request)
    if operation is not None and not operation.uncharged:
        account, generates = request[ACCOUNT], operation.generates and NAME_HEADER not in request.headers
        account.begin(generates=generates)
        await request.app[STATE].limits.begin(account, generates=generates)
    return await handler(request)


@web.middleware
async def admit(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Admit a request before its body is read. Raises GatewayError."""
    operation = operation_of(request)
    if operation is None or not operation.is_admitted:
        return await handler(request)
    with request.app[STATE].open_requests.admit(route_name(request), request[ACCOUNT]):
        return await handler(request)


@web.middleware
async def write_out(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Write a long body before the request ends, while its bytes count toward the key's share."""
    state = request.app[STATE]
    return await write_long(request, await handler(request), state.watch, partial(state.hold_bytes, request))
