"""A request that was answered before its body was read: what is left of it is not read at all.

By itself aiohttp reads it for ten seconds, as fast as it comes: refused uploads of one client, with a key or without,
kept the event loop as busy as ones that are taken. Where more is to come than a body may have, the answer is written,
nothing more is read, and the connection ends: after a second, since a client that still writes when it ends may lose
the answer. What is left of a shorter body is read, and its connection serves on.

A chat's way in, around all other steps. It knows no route, and not why the body was left.
"""

import asyncio

from aiohttp import web
from aiohttp.typedefs import Handler

from gateway.requests.request_body import MAX_BODY_BYTES

OPEN_SECONDS = 1.0


@web.middleware
async def leave_unread(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        response = await handler(request)
    except web.HTTPException as redirect:
        if not _is_long(request):
            raise
        response = redirect
    if _is_long(request):
        await _end(request, response)
    return response


def _is_long(http: web.Request) -> bool:
    """Whether more of the body is to come than may be read to keep a connection."""
    if http.content.is_eof():
        return False
    length = http.content_length
    return length is None or length > MAX_BODY_BYTES


async def _end(http: web.Request, response: web.StreamResponse) -> None:
    if not response.prepared:
        response.force_close()
        await response.prepare(http)
    await response.write_eof()
    await asyncio.sleep(OPEN_SECONDS)  # nobody reads: what has come fills this connection's buffers, and no more
    http.protocol.force_close()
