"""Requests answered before their body was read: the rest of the body is read slowly and only for a short time.

aiohttp alone reads it for ten seconds, as fast as it comes: refused uploads kept the event loop as busy as accepted
ones. Closing at once would make most asyncio clients, which are still writing, lose the response. So if more remains
than a body may have, all such requests together get one read per 5 ms (2 % of the loop), and the connection is closed
after two seconds. The rest of a shorter body is read in turns with accepted ones, and its connection stays open.
"""

import asyncio
from contextlib import suppress

from aiohttp import StreamReader, web
from aiohttp.typedefs import Handler, Middleware

from gateway.http.json_body import MAX_BODY_BYTES
from gateway.http.read_turns import ReadTurns

PAUSE_SECONDS = 0.005  # between two reads of all requests together, each of at most 384 KiB: 75 MB/s
OPEN_SECONDS = 2.0
REST_SECONDS = 10.0  # for the rest of a shorter body, as in aiohttp


def leave_unread(turns: ReadTurns) -> Middleware:
    slow_turns = asyncio.Lock()  # first in, first out

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            response = await handler(request)
        except web.HTTPException as redirect:
            if request.content.is_eof():
                raise
            response = redirect
        if not request.content.is_eof():
            await _end(request, response, turns, slow_turns)
        return response

    return middleware


def _is_long(http: web.Request) -> bool:
    """Return whether the rest of the body may be too long to be read for the sake of the connection."""
    length = http.content_length
    return length is None or length > MAX_BODY_BYTES


async def _end(http: web.Request, response: web.StreamResponse, turns: ReadTurns, slow_turns: asyncio.Lock) -> None:
    is_long = _is_long(http)
    if not response.prepared:
        if is_long:
            response.force_close()
        await response.prepare(http)
    await response.write_eof()
    if is_long:
        await _read_little(http.content, slow_turns)
    else:
        await _read_rest(http.content, turns)
    if is_long or not http.content.is_eof():
        http.protocol.force_close()


async def _read_little(content: StreamReader, slow_turns: asyncio.Lock) -> None:
    clock = asyncio.get_running_loop().time
    until = clock() + OPEN_SECONDS
    while not content.is_eof() and clock() < until:
        async with slow_turns:
            await asyncio.sleep(PAUSE_SECONDS)
        content.read_nowait()


async def _read_rest(content: StreamReader, turns: ReadTurns) -> None:
    with suppress(OSError, TimeoutError, web.RequestPayloadError):  # then the connection is closed
        async with asyncio.timeout(REST_SECONDS):
            while not content.is_eof():
                await turns.read(content)
