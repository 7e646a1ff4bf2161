"""Three duties of recovery's task: it tells the store what this gateway has to tell it, and repeats it until it has.

    Withdrawals        CANCEL what its readers have let go of
    HeldAnswers        PROLONG the kept answers that are made or read here
    OverdueRequests    CANCEL what did not begin, or end, in its time

Beside a chat's way in and back: inference_client.py hands them to recovery.py, which asks each at every tick. They know
no client, no HTTP and nothing of what an answer says.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from redis.exceptions import RedisError

from gateway.store.response_stream import ResponseStream, cancelled_event
from gateway.store.stream_table import StreamTable
from shared.capabilities import NEEDS_NEWER_MESSAGE, needs_of
from shared.fleet_clock import FleetClock
from shared.messages import (
    PROTOCOL_VERSION,
    ErrorCode,
    ErrorEvent,
    EventBatch,
    GenerationRequest,
    TerminalEvent,
    encode,
)
from shared.new_requests import PROLONG_SECONDS, RETAINED_SECONDS
from shared.redis_scripts import RedisScripts
from shared.store_errors import is_transient

logger = logging.getLogger("gateway")


async def _cancel(scripts: RedisScripts, terminal: TerminalEvent, priority_class: str, **whose: Any) -> bool:
    """End a request with this event, for whoever reads it. Whether it had not ended."""
    blob = encode(EventBatch(PROTOCOL_VERSION, "gateway", 0, [terminal]))
    return await scripts.cancel(terminal.request_id, priority_class, event=encode(terminal), blob=blob, **whose)


class Withdrawals:
    """Requests that this gateway lets go of, until the store has heard it. Repeating a cancel is harmless."""

    def __init__(self, scripts: RedisScripts, wake: asyncio.Event) -> None:
        """`wake` is set when there is something to send."""
        self._scripts = scripts
        self._wake = wake
        self._open: dict[tuple[str, str], tuple[str, TerminalEvent]] = {}  # (request id, holder) -> class, its end

    def __len__(self) -> int:
        return len(self._open)

    def add(self, stream: ResponseStream, terminal: TerminalEvent | None = None) -> None:
        """This reader lets go of it; `terminal` is its end if nobody else holds it."""
        holder = stream.terms.holder if stream.terms else ""
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
        """Never raises for the store: what is left is sent by the next call. What it refuses for good is dropped, or it
        would hold up the others."""
        for (request_id, holder), (priority_class, terminal) in list(self._open.items()):
            try:
                await _cancel(self._scripts, terminal, priority_class, holder=holder)
            except (RedisError, OSError) as error:
                if is_transient(error):
                    return
                logger.error("request %s cannot be withdrawn: %s", request_id, error)
            self._open.pop((request_id, holder), None)


class HeldAnswers:
    """Kept answers that this gateway makes or reads: while one goes on, its name and the parts that have ended live on.

    Each of them would expire at a time of its own; prolonged until the end of the last part and once more then, an
    answer and its name can be had for RETAINED_SECONDS after its end, and not longer.
    """

    def __init__(self, scripts: RedisScripts, clock: Callable[[], float] = time.monotonic) -> None:
        self._scripts = scripts
        self._clock = clock
        self._open: list[Sequence[ResponseStream]] = []
        self._prolonged_at = 0.0

    def add(self, parts: Sequence[ResponseStream]) -> None:
        """One answer's parts; passed over if it has ended, or if nothing of it can expire before its end."""
        terms = parts[0].terms
        if terms is not None and (terms.name or len(parts) > 1) and not all(part.had_ended for part in parts):
            self._open.append(parts)

    def clear(self) -> None:
        """They go on without this gateway, for as long as they were last prolonged."""
        self._open.clear()

    async def prolong(self) -> None:
        """Answers that have ended here are prolonged at once, others every PROLONG_SECONDS. May raise the store's
        errors, and be repeated."""
        now = self._clock()
        is_due = now - self._prolonged_at >= PROLONG_SECONDS
        for parts in list(self._open):
            is_over = all(part.has_ended for part in parts)
            if is_over or is_due:
                await self._prolong(parts, is_over=is_over)
        if is_due:
            self._prolonged_at = now

    async def _prolong(self, parts: Sequence[ResponseStream], *, is_over: bool) -> None:
        terms = parts[0].terms
        assert terms is not None
        name_seconds = RETAINED_SECONDS if is_over else terms.name_seconds
        await self._scripts.prolong([part.request_id for part in parts], terms.name, name_seconds)
        if is_over and parts in self._open:
            self._open.remove(parts)


_MESSAGES = {
    ErrorCode.QUEUE_TIMEOUT: "no worker began with it in time",
    ErrorCode.DEADLINE_EXCEEDED: "its time is over",
}


class OverdueRequests:
    """Ends requests whose time is over, in the store first: what a worker began with just in time waits no longer."""

    def __init__(
        self,
        scripts: RedisScripts,
        fleet_clock: FleetClock,
        streams: StreamTable,
        can_serve: Callable[[int], bool] = lambda _needs: True,
    ) -> None:
        """`can_serve`: whether some worker has these capabilities."""
        self._can_serve = can_serve
        self._scripts = scripts
        self._clock = fleet_clock
        self._streams = streams

    async def end(self) -> None:
        """For whoever holds them. May raise the store's errors, and be repeated."""
        for stream in self._streams:
            code = self._code_of(stream)
            if code is None:
                continue
            event = ErrorEvent(stream.request_id, code, self._message_of(code, stream.request))
            only_unstarted, priority_class = code is ErrorCode.QUEUE_TIMEOUT, stream.request.priority_class
            is_ended = await _cancel(self._scripts, event, priority_class, only_unstarted=only_unstarted)
            if is_ended or await self._is_gone(stream):
                self._streams.end(stream, event)
            else:
                stream.has_begun = stream.is_behind = True  # or it has ended: the journal knows

    def _message_of(self, code: ErrorCode, request: GenerationRequest) -> str:
        if code is ErrorCode.QUEUE_TIMEOUT and not self._can_serve(needs_of(request)):
            return NEEDS_NEWER_MESSAGE
        return _MESSAGES[code]

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
