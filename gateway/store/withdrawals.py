"""Requests that this gateway lets go of, until the store has heard it. Repeating a cancel is harmless.

The end of a chat whose client has gone. It knows no client and no reason.
"""

import asyncio
from collections.abc import Iterable
from contextlib import suppress

from redis.exceptions import RedisError

from gateway.store.response_stream import ResponseStream, cancelled_event
from shared.messages import PROTOCOL_VERSION, EventBatch, GenerationRequest, TerminalEvent, encode
from shared.redis_scripts import RedisScripts


class Withdrawals:
    def __init__(self, scripts: RedisScripts, wake: asyncio.Event) -> None:
        """`wake` is set when there is something to send."""
        self._scripts = scripts
        self._wake = wake
        self._open: dict[tuple[str, str], tuple[str, TerminalEvent]] = {}  # (request id, holder) -> class, its end

    def __len__(self) -> int:
        return len(self._open)

    def add(self, stream: ResponseStream, terminal: TerminalEvent | None = None) -> None:
        """This reader lets go of it; `terminal` is its end if nobody else holds it."""
        holder = stream.keep.holder if stream.keep else ""
        terminal = terminal or cancelled_event(stream)
        self._open[stream.request_id, holder] = stream.request.priority_class, terminal
        self._wake.set()

    def add_all(self, streams: Iterable[ResponseStream]) -> None:
        for stream in streams:
            self.add(stream)

    def add_request(self, request: GenerationRequest) -> None:
        """Whoever holds it."""
        self._open[request.request_id, ""] = request.priority_class, cancelled_event(ResponseStream(request))

    async def send(self) -> None:
        """Never raises for the store: what is left is sent by the next call."""
        with suppress(RedisError, OSError):
            for (request_id, holder), (priority_class, terminal) in list(self._open.items()):
                blob = encode(EventBatch(PROTOCOL_VERSION, "gateway", 0, [terminal]))
                await self._scripts.cancel(request_id, priority_class, holder=holder, event=encode(terminal), blob=blob)
                self._open.pop((request_id, holder), None)
