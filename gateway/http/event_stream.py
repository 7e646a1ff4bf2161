"""One open SSE response, and the watch over all of them: comments into silence, an end to clients that stopped reading.

The watch looks at every stream on its own tick, because a timer a stream would have to be moved with every token. Knows
the bytes of a comment, no other content.
"""

import asyncio
import time
from collections.abc import Callable, Mapping

from aiohttp import web

from gateway.http import sse

TICK_SECONDS = 0.5


class EventStream:
    def __init__(self, request: web.Request, headers: Mapping[str, str], watch: "StreamWatch") -> None:
        self._request = request
        self._response = web.StreamResponse(headers={**sse.HEADERS, **headers})
        self._watch = watch
        self.last_write_at = time.monotonic()
        self.write_began_at: float | None = None

    @property
    def response(self) -> web.StreamResponse:
        return self._response

    async def open(self) -> None:
        await self._response.prepare(self._request)
        self._watch.add(self)

    async def write(self, data: bytes) -> None:
        """Waits while the client is behind by more than a socket's buffer. ConnectionResetError: it is gone."""
        self.write_began_at = self.last_write_at = time.monotonic()
        try:
            await self._response.write(data)
        finally:
            self.write_began_at = None

    async def write_keep_alive(self) -> None:
        try:
            await self.write(sse.KEEP_ALIVE)
        except ConnectionResetError:
            return  # the handler is cancelled by aiohttp

    def abort(self) -> None:
        if self._request.transport is not None:
            self._request.transport.abort()

    def close(self) -> None:
        self._watch.discard(self)


class StreamWatch:
    def __init__(
        self, keep_alive_seconds: float, stall_seconds: float, on_stall: Callable[[], None] = lambda: None
    ) -> None:
        self._keep_alive_seconds = keep_alive_seconds
        self._stall_seconds = stall_seconds
        self._on_stall = on_stall
        self._streams: set[EventStream] = set()
        self._writes: set[asyncio.Task[None]] = set()

    def add(self, stream: EventStream) -> None:
        self._streams.add(stream)

    def discard(self, stream: EventStream) -> None:
        self._streams.discard(stream)

    async def run(self) -> None:
        while True:
            await asyncio.sleep(TICK_SECONDS)
            self.look(time.monotonic())

    def look(self, now: float) -> None:
        for stream in tuple(self._streams):
            if stream.write_began_at is not None:
                if now - stream.write_began_at >= self._stall_seconds:
                    self.discard(stream)
                    self._on_stall()
                    stream.abort()
            elif now - stream.last_write_at >= self._keep_alive_seconds:
                task = asyncio.create_task(stream.write_keep_alive())
                self._writes.add(task)
                task.add_done_callback(self._writes.discard)
