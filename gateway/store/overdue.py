"""Ends requests whose time is over, in the store first: what a worker began with just in time is not called waiting.

Beside a chat's way: recovery's task asks it at every tick. It knows no client and no HTTP.
"""

from gateway.store.response_stream import ResponseStream
from gateway.store.stream_table import StreamTable
from shared.fleet_clock import FleetClock
from shared.messages import PROTOCOL_VERSION, ErrorCode, ErrorEvent, EventBatch, encode
from shared.redis_scripts import RedisScripts

_MESSAGES = {
    ErrorCode.QUEUE_TIMEOUT: "no worker began with it in time",
    ErrorCode.DEADLINE_EXCEEDED: "its time is over",
}


class OverdueRequests:
    def __init__(self, scripts: RedisScripts, fleet_clock: FleetClock, streams: StreamTable) -> None:
        self._scripts = scripts
        self._clock = fleet_clock
        self._streams = streams

    async def end(self) -> None:
        """For whoever holds them. May raise the store's errors, and be repeated."""
        for stream in self._streams:
            code = self._code_of(stream)
            if code is None:
                continue
            event = ErrorEvent(stream.request_id, code, _MESSAGES[code])
            if await self._cancel(stream, event) or await self._is_gone(stream):
                self._streams.end(stream, event)
            else:
                stream.has_begun = stream.is_behind = True  # or it has ended: the journal knows

    def _code_of(self, stream: ResponseStream) -> ErrorCode | None:
        request, now = stream.request, self._clock.now()
        if not stream.is_accepted:
            return None
        if request.deadline is not None and now >= request.deadline:
            return ErrorCode.DEADLINE_EXCEEDED
        if request.queue_deadline is None or now < request.queue_deadline:
            return None
        if stream.has_begun and stream.num_tokens:
            return None  # without a token it is asked again: its worker may die, or hand it back
        return ErrorCode.QUEUE_TIMEOUT

    async def _is_gone(self, stream: ResponseStream) -> bool:
        """The reply of the CANCEL before this one was lost, or the store has lost the request: its time is over either
        way. One that has tokens is not given up for its time in the queue."""
        if stream.num_tokens:
            return False
        return not await self._scripts.redis.exists(self._scripts.keys.request(stream.request_id))

    async def _cancel(self, stream: ResponseStream, event: ErrorEvent) -> bool:
        return await self._scripts.cancel(
            stream.request_id,
            stream.request.priority_class,
            event=encode(event),
            blob=encode(EventBatch(PROTOCOL_VERSION, "gateway", 0, [event])),
            only_unstarted=event.code is ErrorCode.QUEUE_TIMEOUT,
        )
