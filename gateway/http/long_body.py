"""Long response bodies: written in pieces, and aborted if the client reads nothing.

aiohttp writes a body at once: what the client does not read is copied into this process, tens of megabytes for an
answer with log-probabilities, and stays as long as the client likes. The request has released its place by then, so
one key could hold any number of such bodies.
"""

import asyncio
import socket
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from aiohttp import web

from gateway.http.event_stream import MAX_UNSENT_BYTES, PIECE_BYTES, StreamWatch

# Set on a response whose body is counted elsewhere: an object that counts it for as long as it lives.
COUNTED = web.ResponseKey("counted", object)


class _BodyWrite:
    """Implements Watched (event_stream.py)."""

    is_silent = False
    keep_alive = b""

    def __init__(self, transport: asyncio.WriteTransport) -> None:
        self._transport = transport
        self.last_write_at = time.monotonic()
        self.write_began_at: float | None = self.last_write_at

    def push(self, data: bytes) -> bool:
        raise AssertionError("a body has no comments")

    def abort(self) -> None:
        self._transport.abort()


async def write_long(
    request: web.Request,
    response: web.StreamResponse,
    watch: StreamWatch,
    hold: Callable[[int], AbstractContextManager[object]],
) -> web.StreamResponse:
    """Write the response if its body is long, and return it.

    Args:
        request: The request that is answered.
        response: Its response, not yet prepared.
        watch: Ends the connection of a client that reads nothing.
        hold: Counts bytes until they are sent; raises GatewayError where there is no room for them.

    Raises:
        ConnectionResetError: If the client has gone, or reads nothing.
    """
    body = response.body if isinstance(response, web.Response) and not response.prepared else None
    if not isinstance(body, bytes | bytearray) or len(body) <= PIECE_BYTES or request.method == "HEAD":
        return response
    with nullcontext() if COUNTED in response else hold(len(body)):
        return await _write(request, response, body, watch)


async def _write(
    request: web.Request, response: web.StreamResponse, body: bytes | bytearray, watch: StreamWatch
) -> web.StreamResponse:
    written = web.StreamResponse(status=response.status, headers=response.headers)
    written.content_length = len(body)
    await written.prepare(request)
    if (transport := request.transport) is None:
        raise ConnectionResetError("the client has gone")
    connection = transport.get_extra_info("socket")
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, MAX_UNSENT_BYTES)
    writing = _BodyWrite(transport)
    watch.add(writing)
    try:
        for start in range(0, len(body), PIECE_BYTES):
            writing.write_began_at = time.monotonic()
            await written.write(body[start : start + PIECE_BYTES])
            await asyncio.sleep(0)  # write() does not yield while the client reads: 8 MiB blocked the loop for 12 ms
        await written.write_eof()
    finally:
        watch.discard(writing)
    return written
