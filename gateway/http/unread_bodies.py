"""A request that was answered before its body was read: what is left of it is read slowly, and not for long.

By itself aiohttp reads it for ten seconds, as fast as it comes: refused uploads of one client, with a key or without,
kept the event loop as busy as ones that are taken. To read none of it would end the connection of a client that still
writes, and most asyncio clients then lose the answer. So where more is to come than a body may have, all such requests
together have a read each 5 ms, 2 % of the loop; who is not through in two seconds is cut off. What is left of a
shorter body is read, and its connection serves on.

A chat's way in, around all other steps. It knows no route, and not why the body was left.
"""

import asyncio

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from gateway.requests.request_body import MAX_BODY_BYTES

PAUSE_SECONDS = 0.005  # between two reads, of all requests together: 384 KiB at most, 75 MB/s
OPEN_SECONDS = 2.0


def leave_unread() -> Middleware:
    turns = asyncio.Lock()  # who waits for it has it in order

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            response = await handler(request)
        except web.HTTPException as redirect:
            if not _is_long(request):
                raise
            response = redirect
        if _is_long(request):
            await _end(request, response, turns)
        return response

    return middleware


def _is_long(http: web.Request) -> bool:
    """Whether more of the body is to come than may be read to keep a connection."""
    if http.content.is_eof():
        return False
    length = http.content_length
    return length is None or length > MAX_BODY_BYTES


async def _end(http: web.Request, response: web.StreamResponse, turns: asyncio.Lock) -> None:
    if not response.prepared:
        response.force_close()
        await response.prepare(http)
    await response.write_eof()
    clock = asyncio.get_running_loop().time
    until = clock() + OPEN_SECONDS
    while not http.content.is_eof() and clock() < until:
        async with turns:
            await asyncio.sleep(PAUSE_SECONDS)
        http.content.read_nowait()
    http.protocol.force_close()
