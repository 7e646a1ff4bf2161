"""GET /openapi.json: what every route takes and answers, made once at the start.

gateway/app.py adds it behind all other routes, with their OPERATIONS; gateway/openapi.py makes the document of them.
No request's way leads through it, and it knows no route by name.
"""

from collections.abc import Iterable
from functools import cache

import msgspec
from aiohttp import web

from gateway.openapi import Operation, describe

OPERATIONS = (Operation(method="GET", path="/openapi.json", summary="This description", answer=dict),)


@cache  # 50 ms of CPU: a process with many gateways, as in tests, makes it once
def _document(operations: tuple[Operation, ...]) -> bytes:
    return msgspec.json.encode(describe(operations))


def routes(operations: Iterable[Operation]) -> list[web.RouteDef]:
    """`operations`: those of every other module of routes that is served."""
    document = _document((*operations, *OPERATIONS))

    async def show_description(request: web.Request) -> web.Response:
        return web.Response(body=document, content_type="application/json")

    return [web.get("/openapi.json", show_description)]
