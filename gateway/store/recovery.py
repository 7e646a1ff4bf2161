"""The task that recovers what was lost: tokens of streams from their journals, and requests that the store lost.

A stream's journal is read after a gap, after each (re)subscription, and after 2 s without events. A request whose hash
is gone from the store, although it was not cancelled, is accepted again with the tokens already sent. Events of the
previous attempt may still arrive, so the stream is suspended until a marker published after them has arrived.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from redis.exceptions import RedisError

from gateway.store.acceptance import Acceptance
from gateway.store.duties import Withdrawals
from gateway.store.inbox import Inbox, StreamState
from gateway.store.request_archive import STORED_END, RequestArchive, is_missing, is_orphaned
from gateway.store.store_calls import RequestGone, StoreCalls
from gateway.store.stream_table import DeliveryCounts, StreamTable
from shared.capabilities import NEEDS_NEWER_MESSAGE, needs_of, was_refused_as_unreadable
from shared.messages import ErrorCode, ErrorEvent, FormatError, StoredChoice
from shared.redis_scripts import AttachStatus
from shared.store_errors import Backoff, is_transient
from shared.ticks import until_tick

QUIET_SECONDS = 2.0
TICK_SECONDS = 0.5
BATCH_REQUESTS = 64
DIVERGED_MESSAGE = "the store lost tokens that were already sent, and the answer continued with different ones"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Reading:
    """One reading of a stream's journal, and the state of the stream before it."""

    stream: Inbox
    epoch: int
    num_doubts: int
    num_known: list[int]  # tokens of each choice

    @classmethod
    def of(cls, stream: Inbox) -> "_Reading":
        return cls(stream, stream.epoch, stream.num_doubts, stream.num_known)

    @property
    def is_obsolete(self) -> bool:
        """Whether, after the reading had begun, the journal was replaced or the store may have failed over."""
        return (self.stream.epoch, self.stream.num_doubts) != (self.epoch, self.num_doubts)

    def lacks_tokens(self, choices: Sequence[StoredChoice]) -> bool:
        """Return whether the store has lost tokens that the reader has, so that others may be generated for them."""
        return any(len(choice.token_ids) < known for choice, known in zip(choices, self.num_known, strict=False))


class Recovery:
    def __init__(
        self,
        streams: StreamTable,
        acceptance: Acceptance,
        archive: RequestArchive,
        withdrawals: Withdrawals,
        calls: StoreCalls,
        counts: DeliveryCounts,
        *,
        quiet_seconds: float = QUIET_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._streams = streams
        self._acceptance = acceptance
        self._archive = archive
        self._withdrawals = withdrawals
        self._calls = calls
        self._counts = counts
        self._quiet_seconds = quiet_seconds
        self._clock = clock

    async def run(self, wake: asyncio.Event, duties: Sequence[Callable[[], Awaitable[None]]]) -> None:
        """At every wake or tick, run `duties`, then recover streams. Runs as an owner task.

        Store errors of a duty are logged, and everything is repeated.
        """
        backoff = Backoff()
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(until_tick(TICK_SECONDS)):
                    await wake.wait()
            wake.clear()
            try:
                for duty in duties:
                    await duty()
                await self._catch_up()
                backoff.reset()
            except (RedisError, OSError) as error:  # if the store is unusable, FleetClock ends the process
                logger.warning("recovery: store error: %s", error)
                await asyncio.sleep(backoff.next_delay())

    async def attach(self, streams: Sequence[Inbox]) -> None:
        """Continue the streams of a kept answer from their journals, or end them at once (`had_ended`).

        Raises:
            RequestGone: If the store does not have a request.
            FormatError: If a stored answer is unreadable.
            RedisError, OSError: If the store fails.
        """
        for stream in streams:
            is_open = await self._attach(stream)
            stream.accept()
            if is_open:
                if not self._has_joined(stream):
                    self._streams.need_journals([stream])
                continue
            stream.had_ended = True
            ((stored, journal),) = await self._archive.read([stream.request_id], STORED_END)
            if is_missing(stored):
                raise RequestGone(stream.request_id)
            await self._replay(_Reading.of(stream), stored, journal)

    async def _attach(self, stream: Inbox, *, again: bool = False) -> bool:
        status = await self._acceptance.attach(stream, again=again)
        if status is AttachStatus.QUEUED_AGAIN:
            self._counts.num_restored_requests += 1
            logger.warning("request %s: ended while this gateway was disconnected; requeued", stream.request_id)
        if stream not in self._streams:
            self._withdrawals.add(stream)  # released while the call ran
        return bool(status)

    async def _catch_up(self) -> None:
        quiet_since = self._clock() - self._quiet_seconds
        due = [stream for stream in self._streams if self._is_due(stream) and not self._has_joined(stream)]
        for stream in due:
            if stream.terms and stream.last_event_at <= quiet_since:
                with self._only(stream):
                    await self._attach(stream, again=True)  # the worker may have missed this gateway, or ended it
        for start in range(0, len(due), BATCH_REQUESTS):
            await self._read_journals(due[start : start + BATCH_REQUESTS])

    def _is_due(self, stream: Inbox) -> bool:
        """Return whether to read its journal now."""
        match stream.state:
            case StreamState.PENDING | StreamState.PAUSED | StreamState.ENDED:
                return False
            case StreamState.NEEDS_JOURNAL:
                return stream.reread_at <= self._clock()
            case StreamState.DIVERGED:
                return not stream.num_replays  # two repairs at once would withdraw the repaired request
            case StreamState.SUSPENDED:  # the marker is in flight, or the call that sends it got no reply
                quiet_seconds = min(self._quiet_seconds, TICK_SECONDS)
            case StreamState.QUEUED | StreamState.LIVE:
                quiet_seconds = self._quiet_seconds
        return stream.last_event_at <= self._clock() - quiet_seconds

    def _has_joined(self, stream: Inbox) -> bool:
        """Let a stream take what it misses from another reader of its answer, if that has everything."""
        if not self._streams.join(stream):
            return False
        stream.on_ready()
        return True

    async def _read_journals(self, streams: list[Inbox]) -> None:
        self._counts.num_journal_reads += len(streams)
        readings = [_Reading.of(stream) for stream in streams]
        replies = await self._archive.read([stream.request_id for stream in streams], STORED_END)
        for reading, (stored, journal) in zip(readings, replies, strict=True):
            with self._only(reading.stream):
                await self._take_journal(reading, stored, journal)

    async def _take_journal(self, reading: _Reading, stored: Any, journal: Any) -> None:
        for reply in (stored, journal):
            if isinstance(reply, RedisError) and is_transient(reply):
                raise reply
        stream = reading.stream
        stream.last_event_at = self._clock()
        if reading.is_obsolete:
            return
        if is_missing(stored):
            await self._restore(stream)
            return
        if is_orphaned(stored) and not stream.had_ended:
            # Not its end: an observer ended it after this gateway had attached and before it listened to its channel.
            stream.need_journal()
            await self._attach(stream, again=True)
            return
        stream.begin_replay()
        self._calls.own(self._replay_alone(reading, stored, journal))  # a long journal must not delay others
        if stream.state is StreamState.SUSPENDED:
            await self._acceptance.publish_mark(stream)  # the previous marker was lost, or is still in flight

    @contextmanager
    def _only(self, stream: Inbox) -> Iterator[None]:
        """End and count only this stream on an error that a retry cannot fix."""
        try:
            yield
        except Exception as error:
            if is_transient(error):
                raise
            self._counts.num_message_errors += 1
            logger.exception("request %s: failed", stream.request_id)
            self._streams.fail(stream)

    async def _replay_alone(self, reading: _Reading, stored: Any, journal: Any) -> None:
        try:
            with self._only(reading.stream):
                await self._replay(reading, stored, journal)
        finally:
            reading.stream.end_replay()

    async def _replay(self, reading: _Reading, stored: Any, journal: Any) -> None:
        stream = reading.stream
        try:
            answer = await self._archive.decoded(stream.request, stored, journal, reading.num_known)
            if reading.is_obsolete:
                return
            if needs_of(stream.request) and was_refused_as_unreadable(answer[1]):
                await self._submit_to_newer(stream)
                return
            # From events that arrived while decoding.
            has_hole = stream.state is StreamState.NEEDS_JOURNAL or stream.state is StreamState.DIVERGED
            if not stream.add_journal(*answer):
                await self._mend(stream)
            elif reading.lacks_tokens(answer[0]):
                stream.await_journal(self._clock() + TICK_SECONDS)
            elif has_hole:
                stream.need_journal()
        except FormatError as error:
            logger.error("request %s: journal unreadable: %s", stream.request_id, error)
            stream.end(ErrorEvent(stream.request_id, ErrorCode.REQUEST_FAILED, "the stored answer is unreadable"))
            self._withdrawals.add(stream)
        self._streams.settle(stream)

    async def _restore(self, stream: Inbox) -> None:
        """Accept the request again; if it had ended, it has expired, and its reader gets an error."""
        if stream not in self._streams:
            return  # cancelled or ended by now
        if stream.had_ended:
            event = ErrorEvent(stream.request_id, ErrorCode.REQUEST_FAILED, "the stored answer is no longer kept")
            self._streams.end(stream, event)
            return
        await self._accept_anew(stream)
        self._counts.num_restored_requests += 1
        logger.warning("request %s: lost by the store; accepted again", stream.request_id)

    async def _mend(self, stream: Inbox) -> None:
        """Repair a diverged stream: the store lost the end of its journal, and a worker generated other tokens.

        The request is withdrawn and accepted again with the tokens that its reader has. If it has ended, or others read
        it, the stored answer stays and only this reader gets an error.
        """
        was_taken_back = await self._acceptance.take_back(stream)
        self._counts.num_torn_streams += 1
        if was_taken_back:
            await self._accept_anew(stream)
        else:
            self._streams.end(stream, ErrorEvent(stream.request_id, ErrorCode.REQUEST_FAILED, DIVERGED_MESSAGE))

    async def _submit_to_newer(self, stream: Inbox) -> None:
        """Accept the request again for newer workers: a worker without its capabilities had claimed it."""
        stream.need_journal()  # until this is done, because a reply may be lost
        if self._acceptance.can_serve(stream.request):
            await self._acceptance.forget(stream)
            await self._accept_anew(stream)
        else:
            event = ErrorEvent(stream.request_id, ErrorCode.QUEUE_TIMEOUT, NEEDS_NEWER_MESSAGE)
            self._streams.end(stream, event)

    async def _accept_anew(self, stream: Inbox) -> None:
        if stream not in self._streams:
            return  # cancelled or ended by now
        self._streams.suspend(stream)
        await self._acceptance.restore(stream)
        if stream not in self._streams:
            self._withdrawals.add(stream)  # released while the call ran
