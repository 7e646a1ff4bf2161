"""Three duties of the recovery task: calls to the store that are repeated until they succeed.

Withdrawals        CANCEL requests that their readers released
HeldAnswers        PROLONG kept answers that are made or read here
OverdueRequests    CANCEL requests that did not start or end in time
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any

from redis.exceptions import RedisError

from gateway.store.inbox import Inbox, StreamState, cancelled_event
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

_SENT_AT_ONCE = 64  # withdrawals; one reply may take a long iteration of the event loop

logger = logging.getLogger("gateway")


async def _cancel(scripts: RedisScripts, terminal: TerminalEvent, priority_class: str, **whose: Any) -> bool:
    """End a request with this event for all its readers; return whether it had not ended before."""
    blob = encode(EventBatch(PROTOCOL_VERSION, "gateway", 0, [terminal]))
    return await scripts.cancel(terminal.request_id, priority_class, event=encode(terminal), blob=blob, **whose)


class Withdrawals:
    """Requests that this gateway released and the store may not know yet. Repeating a cancel is harmless."""

    def __init__(self, scripts: RedisScripts, wake: asyncio.Event) -> None:
        """Create an empty list; `wake` is set when there is something to send."""
        self._scripts = scripts
        self._wake = wake
        self._open: dict[tuple[str, str], tuple[str, TerminalEvent]] = {}  # (request id, holder) -> class, its end
        self._sending: asyncio.Future[None] | None = None

    def __len__(self) -> int:
        return len(self._open)

    def add(self, stream: Inbox, terminal: TerminalEvent | None = None) -> None:
        """Add a stream whose reader released it; the request ends with `terminal` if it has no other holder."""
        holder = stream.terms.holder if stream.terms else ""
        terminal = terminal or cancelled_event(stream)
        self._open[stream.request_id, holder] = stream.request.priority_class, terminal
        self._wake.set()

    def add_all(self, streams: Iterable[Inbox]) -> None:
        for stream in streams:
            self.add(stream)

    def add_request(self, request: GenerationRequest) -> None:
        """Add a request that ends for all its holders."""
        self._open[request.request_id, ""] = request.priority_class, cancelled_event(Inbox(request))

    async def send(self) -> None:
        """Send what is open. Store errors are not raised: the next call sends the rest.

        A call during another one waits for it, which also sends what was added meanwhile: when 1,000 readers leave at
        once, each withdrawal is sent once.
        """
        if self._sending is not None:
            await asyncio.shield(self._sending)
            return
        self._sending = asyncio.get_running_loop().create_future()
        try:
            while some := list(islice(self._open, _SENT_AT_ONCE)):
                if not all(await asyncio.gather(*map(self._send, some))):
                    return
        finally:
            self._sending.set_result(None)
            self._sending = None

    async def _send(self, whose: tuple[str, str]) -> bool:
        """Send one; return False if it must be sent again.

        A withdrawal that the store refuses permanently is dropped, so that it does not block the others.
        """
        request_id, holder = whose
        priority_class, terminal = self._open[whose]
        try:
            await _cancel(self._scripts, terminal, priority_class, holder=holder)
        except (RedisError, OSError) as error:
            if is_transient(error):
                return False
            logger.error("request %s: not withdrawn: %s", request_id, error)
        self._open.pop(whose, None)
        return True


class HeldAnswers:
    """Kept answers that this gateway makes or reads: while one runs, its name and its ended parts must not expire.

    Each part would expire at its own time. All are prolonged until the last part ends, and once more then, so an answer
    and its name stay available for RETAINED_SECONDS after its end.
    """

    def __init__(self, scripts: RedisScripts, clock: Callable[[], float] = time.monotonic) -> None:
        self._scripts = scripts
        self._clock = clock
        self._open: list[Sequence[Inbox]] = []
        self._prolonged_at = 0.0

    def add(self, parts: Sequence[Inbox]) -> None:
        """Add one answer's parts; ignored if it has ended, or if nothing of it can expire before its end."""
        terms = parts[0].terms
        if terms is not None and (terms.name or len(parts) > 1) and not all(part.had_ended for part in parts):
            self._open.append(parts)

    def clear(self) -> None:
        """Stop prolonging; the answers then expire at the time last set."""
        self._open.clear()

    async def prolong(self) -> None:
        """Prolong answers that have ended here at once, the others every PROLONG_SECONDS.

        Raises:
            RedisError, OSError: If the store fails; call it again.
        """
        now = self._clock()
        is_due = now - self._prolonged_at >= PROLONG_SECONDS
        for parts in list(self._open):
            is_over = all(part.has_ended for part in parts)
            if is_over or is_due:
                await self._prolong(parts, is_over=is_over)
        if is_due:
            self._prolonged_at = now

    async def _prolong(self, parts: Sequence[Inbox], *, is_over: bool) -> None:
        terms = parts[0].terms
        assert terms is not None
        name_seconds = RETAINED_SECONDS if is_over else terms.name_seconds
        await self._scripts.prolong([part.request_id for part in parts], terms.name, name_seconds)
        if is_over and parts in self._open:
            self._open.remove(parts)


_MESSAGES = {
    ErrorCode.QUEUE_TIMEOUT: "no worker started the request within queue_timeout_seconds",
    ErrorCode.DEADLINE_EXCEEDED: "the request's deadline passed",
}


class OverdueRequests:
    """Ends requests whose deadline passed, in the store first: a worker may have started one just in time."""

    def __init__(
        self,
        scripts: RedisScripts,
        fleet_clock: FleetClock,
        streams: StreamTable,
        can_serve: Callable[[int], bool] = lambda _needs: True,
    ) -> None:
        """Create the duty; `can_serve` returns whether any worker has the given capabilities."""
        self._can_serve = can_serve
        self._scripts = scripts
        self._clock = fleet_clock
        self._streams = streams

    async def end(self) -> None:
        """End overdue requests for all their holders.

        Raises:
            RedisError, OSError: If the store fails; call it again.
        """
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
                stream.need_journal()  # a worker has it, or it has ended

    def _message_of(self, code: ErrorCode, request: GenerationRequest) -> str:
        if code is ErrorCode.QUEUE_TIMEOUT and not self._can_serve(needs_of(request)):
            return NEEDS_NEWER_MESSAGE
        return _MESSAGES[code]

    def _code_of(self, stream: Inbox) -> ErrorCode | None:
        request, now = stream.request, self._clock.now()
        if stream.state is StreamState.PENDING:
            return None
        if request.deadline is not None and now >= request.deadline:
            return ErrorCode.DEADLINE_EXCEEDED
        if request.queue_deadline is None or now < request.queue_deadline:
            return None
        if stream.num_tokens:
            return None  # without a token it is checked again, because its worker may die or requeue it
        return ErrorCode.QUEUE_TIMEOUT

    async def _is_gone(self, stream: Inbox) -> bool:
        """Return whether the store has no such request: a CANCEL's reply was lost, or the store lost the request.

        A request with tokens is not ended for a queue timeout.
        """
        if stream.num_tokens:
            return False
        return not await self._scripts.redis.exists(self._scripts.keys.request(stream.request_id))
