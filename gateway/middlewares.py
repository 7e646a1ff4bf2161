"""What surrounds every route: a request id, a duration, and OpenAI's error object for whatever goes wrong."""

import logging
import re
import secrets
import time
from collections.abc import Awaitable, Callable

from aiohttp import web
from aiohttp.typedefs import Middleware

from gateway.answers.anthropic_response import anthropic_error
from gateway.errors import BodyTooLarge, GatewayError, InternalError, InvalidRequest, MethodNotAllowed, UnknownUrl
from gateway.http.anthropic_dialect import ID_HEADER as ANTHROPIC_ID_HEADER
from gateway.http.anthropic_dialect import anthropic_id, speaks_anthropic
from gateway.http.route_name import route_name
from gateway.metrics import GatewayMetrics
from shared.logs import request_id as log_request_id

logger = logging.getLogger("gateway")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

REQUEST_ID_HEADER = "x-request-id"
_REQUEST_ID = web.RequestKey("request_id", str)
_SAFE_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"))  # others share a label
_CLIENT_GONE = "499"


@web.middleware
async def identify(request: web.Request, handler: Handler) -> web.StreamResponse:
    """The client's id is for its logs and ours only: ids within the system are never client-chosen."""
    given = request.headers.get(REQUEST_ID_HEADER, "")
    request[_REQUEST_ID] = given if _SAFE_REQUEST_ID.fullmatch(given) else secrets.token_hex(16)
    token = log_request_id.set(request[_REQUEST_ID])
    try:
        return await handler(request)
    finally:
        log_request_id.reset(token)


async def set_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Signal on_response_prepare: headers of a stream leave before its handler returns."""
    response.headers["Server"] = "pagestream"  # aiohttp would tell its own and Python's version
    if _REQUEST_ID in request:
        response.headers[REQUEST_ID_HEADER] = request[_REQUEST_ID]
        if speaks_anthropic(request):
            response.headers[ANTHROPIC_ID_HEADER] = anthropic_id(request[_REQUEST_ID])


def measure(metrics: GatewayMetrics) -> Middleware:
    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        started_at = time.monotonic()
        code = _CLIENT_GONE  # a handler that is cancelled, or whose writes fail, has no client any more
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
            level = logging.INFO if request.method == "POST" else logging.DEBUG  # probes and scrapes are noise
            logger.log(level, "%s %s %s", method, route, code, extra={"seconds": round(seconds, 3)})

    return middleware


@web.middleware
async def errors_to_json(request: web.Request, handler: Handler) -> web.StreamResponse:
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
        logger.exception("unexpected error")  # its text may hold paths and addresses: for the log only
        return error_response(InternalError(), request)


def error_response(error: GatewayError, request: web.Request) -> web.Response:
    body = anthropic_error(error, request[_REQUEST_ID]) if speaks_anthropic(request) else error.body()
    return web.json_response(body, status=error.status, headers=error.headers())


def _of_aiohttp(request: web.Request, error: web.HTTPException) -> GatewayError:
    if isinstance(error, web.HTTPMethodNotAllowed):
        allowed = ", ".join(sorted(error.allowed_methods))
        return MethodNotAllowed(f"{request.method} is not allowed here; {allowed} is.", allowed=allowed)
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        return BodyTooLarge("The request body is too large.")
    if error.status == UnknownUrl.status:
        return UnknownUrl(f"Unknown request URL: {request.method} {request.path[:200]}.")
    return InvalidRequest(error.reason)
