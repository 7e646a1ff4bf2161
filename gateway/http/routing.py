"""The answer for a URL without a route (a redirect, 404 or 405), and the handler of `Expect` for every route.

aiohttp's own handler of `Expect` runs before any middleware, even without a key and on unknown URLs. It repeats the
header in its 417, and raises a UnicodeEncodeError if its bytes are not UTF-8. A handler is set per route, so all other
URLs have a route too.
"""

import re
from collections.abc import Mapping, Sequence
from typing import NoReturn

from aiohttp import web
from aiohttp.http import HttpVersion11

from gateway.http.openapi import Operation

UNKNOWN_ROUTE = "unknown"
OPERATIONS = web.AppKey("OPERATIONS", Mapping[tuple[str, str], Operation])  # by method and path


def route_name(request: web.Request) -> str:
    """Return the matched route pattern, for metric labels and logs; never the URL."""
    resource = request.match_info.route.resource
    return UNKNOWN_ROUTE if resource is None or resource.name == UNKNOWN_ROUTE else resource.canonical


def operation_of(request: web.Request) -> Operation | None:
    """Return the operation of a request; None if its URL or method is unknown."""
    method = "GET" if request.method == "HEAD" else request.method
    return request.app[OPERATIONS].get((method, route_name(request)))


def serve_operations(app: web.Application, operations: Sequence[Operation]) -> None:
    """Add the routes of operations, and one for all other URLs."""
    app[OPERATIONS] = {(operation.method, operation.described_path): operation for operation in operations}
    app.add_routes([web.route(op.method, op.path, op.handler, expect_handler=expect_continue) for op in operations])
    app.router.register_resource(OtherUrls())


class OtherUrls(web.PlainResource):
    """Matches every URL except that of CONNECT, because aiohttp resolves the resources of "/" last."""

    def __init__(self) -> None:
        super().__init__("/", name=UNKNOWN_ROUTE)
        self._refusal = self.add_route("*", _refuse, expect_handler=expect_continue)

    async def resolve(self, request: web.Request) -> tuple[web.UrlMappingMatchInfo, set[str]]:
        return web.UrlMappingMatchInfo({}, self._refusal), set()


async def expect_continue(request: web.Request) -> None:
    if request.version != HttpVersion11:
        return
    if request.headers["Expect"].lower() != "100-continue":
        raise web.HTTPExpectationFailed(text="Expect: only 100-continue is supported.")
    await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    request.writer.output_size = 0  # as aiohttp does: the response has not begun


async def _refuse(request: web.Request) -> NoReturn:
    """Redirect clients that join ".../v1/" and "/models"; raise 405 if the URL has other methods, else 404."""
    path, question_mark, query = request.raw_path.partition("?")
    merged = re.sub("//+", "/", path)
    router = request.app.router
    match = await router.resolve(request.clone(rel_url=merged))
    if match.http_exception is None and match.route.name != UNKNOWN_ROUTE:
        raise web.HTTPPermanentRedirect(merged + question_mark + query)
    methods = set[str]()
    for resource in router.resources():
        matched, allowed = await resource.resolve(request)
        if matched is None:
            methods |= allowed
    raise web.HTTPMethodNotAllowed(request.method, methods) if methods else web.HTTPNotFound
