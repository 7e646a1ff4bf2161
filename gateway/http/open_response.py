"""A response that is written piece by piece, and the watch over all of them: comments, and an end for stalled ones.

aiohttp writes the head and the end. What is between them goes to the transport directly, in our own chunks: aiohttp's
`write` costs two coroutines, three buffers, and 2.5 us per event, and needs a coroutine as caller. The watch checks
every response on one shared tick, because a timer per stream would have to be moved with every token.
"""

import asyncio
import logging
import socket
import time
from collections.abc import Callable
from contextlib import suppress

from aiohttp import hdrs, web

from shared.ticks import next_tick

logger = logging.getLogger(__name__)

TICK_SECONDS = 0.5
PIECE_BYTES = 65_536
# Bytes the kernel buffers for a client beyond those in flight. Its default is up to 4 MiB per stream: a client that
# read nothing was noticed only after 9,600 tokens with 20 log-probabilities each.
MAX_UNSENT_BYTES = 65_536


class OpenResponse:
    __slots__ = (
        "_is_chunked", "_max_waiting_bytes", "_request", "_transport", "_watch", "is_cut_off", "keep_alive",
        "last_write_at", "response", "write_began_at",
    )  # fmt: skip

    def __init__(
        self, request: web.Request, response: web.StreamResponse, watch: "StreamWatch", keep_alive: bytes = b""
    ) -> None:
        """Create it, with a response that is not prepared; `keep_alive` is written when it is idle."""
        self.response = response
        self.keep_alive = keep_alive
        self.is_cut_off: Callable[[], bool] = _never  # whether to close it, because it goes on elsewhere
        self._request = request
        self._watch = watch
        self._transport: asyncio.WriteTransport | None = None
        self._is_chunked = False
        self._max_waiting_bytes = 0
        self.last_write_at = time.monotonic()
        self.write_began_at: float | None = None  # since then, written data waits for the client

    async def open(self) -> None:
        """Send the response head. Raise ConnectionResetError if the client has gone."""
        await self.response.prepare(self._request)
        self._transport = self._request.transport
        if self._transport is None:
            raise ConnectionResetError("the client has gone")
        connection = self._transport.get_extra_info("socket")
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, MAX_UNSENT_BYTES)
        self._is_chunked = self.response.headers.get(hdrs.TRANSFER_ENCODING) == "chunked"  # not for HTTP/1.0
        _, self._max_waiting_bytes = self._transport.get_write_buffer_limits()
        self._watch.add(self)

    def push(self, data: bytes) -> bool:
        """Write now.

        Returns:
            False if more than a socket buffer waits for the client: call drain() before the next write.

        Raises:
            ConnectionResetError: If the client has gone.
        """
        transport = self._transport
        assert transport is not None, "open"
        if not data:
            return True  # an empty chunk would end the response
        if transport.is_closing():
            raise ConnectionResetError("the client has gone")
        transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self._is_chunked else data)
        self.last_write_at = time.monotonic()
        if transport.get_write_buffer_size() <= self._max_waiting_bytes:
            return True
        self.write_began_at = self.last_write_at
        return False

    @property
    def is_silent(self) -> bool:
        """Return whether everything written has left the process, so that a keep-alive comment makes sense."""
        return self._transport is not None and self._transport.get_write_buffer_size() == 0

    async def drain(self) -> None:
        """Wait until the client has caught up. Raise ConnectionResetError if it has gone."""
        try:
            await self._request.writer.drain()
        finally:
            self.write_began_at = None

    async def write(self, data: bytes) -> None:
        """Write, and wait if the client reads more slowly."""
        if not self.push(data):
            await self.drain()

    async def end(self, data: bytes | bytearray) -> None:
        """Write the last data and end the response; long data in pieces, because each write copies all its data."""
        start_of_last = max(0, len(data) - 1) // PIECE_BYTES * PIECE_BYTES
        for start in range(0, start_of_last, PIECE_BYTES):
            await self.write(bytes(data[start : start + PIECE_BYTES]))
            await asyncio.sleep(0)  # write() does not yield while the client keeps up
        self.write_began_at = self.last_write_at = time.monotonic()
        try:
            await self.response.write_eof(bytes(data[start_of_last:]))
        finally:
            self.write_began_at = None

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def close(self) -> None:
        self._watch.discard(self)


def _never() -> bool:
    return False


class StreamWatch:
    def __init__(
        self, keep_alive_seconds: float, stall_seconds: float, on_stall: Callable[[], None] = lambda: None
    ) -> None:
        self._keep_alive_seconds = keep_alive_seconds
        self._stall_seconds = stall_seconds
        self._on_stall = on_stall
        self._streams: set[OpenResponse] = set()

    def add(self, stream: OpenResponse) -> None:
        self._streams.add(stream)

    def discard(self, stream: OpenResponse) -> None:
        self._streams.discard(stream)

    async def run(self) -> None:
        while True:
            await next_tick(TICK_SECONDS)
            self.look(time.monotonic())

    def look(self, now: float) -> None:
        num_cut_off = 0
        for stream in tuple(self._streams):
            if stream.write_began_at is not None:
                if now - stream.write_began_at >= self._stall_seconds:
                    self.discard(stream)
                    self._on_stall()
                    stream.abort()
            elif stream.is_cut_off():
                self.discard(stream)
                num_cut_off += 1
                stream.abort()
            elif now - stream.last_write_at >= self._keep_alive_seconds and stream.is_silent:
                with suppress(ConnectionResetError):  # aiohttp cancels the handler
                    stream.push(stream.keep_alive)
        if num_cut_off:
            logger.warning("the store is silent: closed %d streams, which go on at other gateways", num_cut_off)
