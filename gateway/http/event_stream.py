"""One open SSE response, and the watch over all of them: comments into silence, an end to clients that stopped reading.

aiohttp writes the head and the end. Events in between go to the transport at once, in chunks of our own: its `write` is
two coroutines, three buffers and 2.5 us an event, and only a coroutine can call it. The watch looks at every stream on
its own tick, because a timer a stream would have to be moved with every token. Knows the bytes of a comment, no other
content.

A token's way back, in its very last step.
"""

import asyncio
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Protocol

from aiohttp import hdrs, web

from gateway.http import sse
from shared.ticks import next_tick

TICK_SECONDS = 0.5
PIECE_BYTES = 65_536
# That the kernel takes for a client beyond what is on its way to it. By itself it takes up to 4 MiB a stream: the
# answers of one who reads nothing were written for as long, 9,600 tokens with 20 log-probabilities each.
MAX_UNSENT_BYTES = 65_536


class EventStream:
    def __init__(
        self, request: web.Request, headers: Mapping[str, str], watch: "StreamWatch", keep_alive: bytes = sse.KEEP_ALIVE
    ) -> None:
        """Create a stream; `keep_alive` is written into silence."""
        self.keep_alive = keep_alive
        self._request = request
        self._response = web.StreamResponse(headers={**sse.HEADERS, **headers})
        self._watch = watch
        self._transport: asyncio.WriteTransport | None = None
        self._is_chunked = False
        self._max_waiting_bytes = 0
        self.last_write_at = time.monotonic()
        self.write_began_at: float | None = None  # what is written since then waits for the client

    @property
    def response(self) -> web.StreamResponse:
        return self._response

    async def open(self) -> None:
        """ConnectionResetError: the client has gone."""
        await self._response.prepare(self._request)
        self._transport = self._request.transport
        if self._transport is None:
            raise ConnectionResetError("the client has gone")
        connection = self._transport.get_extra_info("socket")
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, MAX_UNSENT_BYTES)
        self._is_chunked = self._response.headers.get(hdrs.TRANSFER_ENCODING) == "chunked"  # not for HTTP/1.0
        _, self._max_waiting_bytes = self._transport.get_write_buffer_limits()
        self._watch.add(self)

    def push(self, data: bytes) -> bool:
        """Write now. False: the client is behind by more than a socket's buffer, so drain() comes first.

        ConnectionResetError: it is gone."""
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
        """Whatever was written is on its way: what still waits for the client is no silence."""
        return self._transport is not None and self._transport.get_write_buffer_size() == 0

    async def drain(self) -> None:
        """Until the client has caught up. ConnectionResetError: it is gone."""
        try:
            await self._request.writer.drain()
        finally:
            self.write_began_at = None

    async def write(self, data: bytes) -> None:
        """push, and wait for a client that is behind."""
        if not self.push(data):
            await self.drain()

    async def end(self, data: bytes) -> None:
        """The last of it, in pieces if it is long: what is written at one time is copied at one time."""
        for start in range(0, len(data) - PIECE_BYTES, PIECE_BYTES):
            await self.write(data[start : start + PIECE_BYTES])
            await asyncio.sleep(0)  # others' turn, where the client is never waited for
        self.write_began_at = self.last_write_at = time.monotonic()
        try:
            await self._response.write_eof(data[_start_of_last(len(data)) :])
        finally:
            self.write_began_at = None

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def close(self) -> None:
        self._watch.discard(self)


def _start_of_last(num_bytes: int) -> int:
    """The start of the last piece; 0 if all of it is short."""
    return max(0, -(-num_bytes // PIECE_BYTES) - 1) * PIECE_BYTES


class Watched(Protocol):
    """The part of a response that the watch looks at."""

    keep_alive: bytes
    last_write_at: float
    write_began_at: float | None

    @property
    def is_silent(self) -> bool: ...

    def push(self, data: bytes) -> bool: ...

    def abort(self) -> None: ...


class StreamWatch:
    def __init__(
        self, keep_alive_seconds: float, stall_seconds: float, on_stall: Callable[[], None] = lambda: None
    ) -> None:
        self._keep_alive_seconds = keep_alive_seconds
        self._stall_seconds = stall_seconds
        self._on_stall = on_stall
        self._streams: set[Watched] = set()

    def add(self, stream: Watched) -> None:
        self._streams.add(stream)

    def discard(self, stream: Watched) -> None:
        self._streams.discard(stream)

    async def run(self) -> None:
        while True:
            await next_tick(TICK_SECONDS)
            self.look(time.monotonic())

    def look(self, now: float) -> None:
        for stream in tuple(self._streams):
            if stream.write_began_at is not None:
                if now - stream.write_began_at >= self._stall_seconds:
                    self.discard(stream)
                    self._on_stall()
                    stream.abort()
            elif now - stream.last_write_at >= self._keep_alive_seconds and stream.is_silent:
                with suppress(ConnectionResetError):  # aiohttp cancels the handler
                    stream.push(stream.keep_alive)
