"""GET /openapi.json: what every route takes and answers, made once at the start.

gateway/app.py says which routes there are; gateway/openapi.py makes the document of them.
No request's way leads through it, and it knows no route by name.
"""

from functools import cache

import msgspec
from aiohttp import web

from gateway.openapi import Operation, describe

OPERATIONS_OF_ALL = web.AppKey("OPERATIONS_OF_ALL", tuple[Operation, ...])  # that are served, set by app.py


async def show_description(request: web.Request) -> web.Response:
    return web.Response(body=_document(request.app[OPERATIONS_OF_ALL]), content_type="application/json")


@cache  # 50 ms of CPU: a process with many gateways, as in tests, makes it once
def _document(operations: tuple[Operation, ...]) -> bytes:
    return msgspec.json.encode(describe(operations))


OPERATIONS = (Operation("GET", "/openapi.json", show_description, "This description", answer=dict),)
