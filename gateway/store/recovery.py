"""The task that finds again what was lost: streams' tokens in the journals, the store's requests at this gateway.

A stream is read from its journal when it has a hole, after every (re)subscribe, and after 2 s of quiet. A request whose
hash is gone from the store, though nobody cancelled it, is accepted anew with the tokens already sent. What another
attempt had made meanwhile may still be on its way: the stream is set aside until a mark behind it has come.

A token's way back where it is not the straight one: after a lost message, a takeover by another worker, or the loss of
the store. It knows no HTTP, and never speaks to a worker.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from redis.exceptions import RedisError

from gateway.store.acceptance import Acceptance
from gateway.store.duties import Withdrawals
from gateway.store.request_archive import STORED_END, RequestArchive, is_missing
from gateway.store.response_stream import ResponseStream
from gateway.store.store_calls import RequestGone, StoreCalls
from gateway.store.stream_table import DeliveryCounts, StreamTable
from shared.capabilities import NEEDS_NEWER_MESSAGE, needs_of, was_refused_as_unreadable
from shared.messages import ErrorCode, ErrorEvent, FormatError
from shared.redis_scripts import AttachStatus
from shared.store_errors import Backoff, is_transient
from shared.ticks import until_tick

QUIET_SECONDS = 2.0
TICK_SECONDS = 0.5
BATCH_REQUESTS = 64
TORN_MESSAGE = "the store lost tokens that were sent already, and the answer went on in another way"

logger = logging.getLogger(__name__)


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
        """Owner task: at every wake, or tick, what else is due with the store, then what streams miss. `duties` may
        raise the store's errors, and are repeated then."""
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
            except (RedisError, OSError) as error:  # of a store that cannot be used, FleetClock ends the process
                logger.warning("cannot read journals: %s", error)
                await asyncio.sleep(backoff.next_delay())

    async def attach(self, streams: Sequence[ResponseStream]) -> None:
        """The streams of a kept answer go on from their journals, or have their end at once (`had_ended`). Raises
        RequestGone, FormatError and the store's errors."""
        for stream in streams:
            if await self._attach(stream):
                self._streams.mark_behind([stream])
                continue
            stream.had_ended = True
            ((stored, journal),) = await self._archive.read([stream.request_id], STORED_END)
            if is_missing(stored):
                raise RequestGone(stream.request_id)
            await self._replay(stream, stream.epoch, stored, journal)

    async def _attach(self, stream: ResponseStream, *, again: bool = False) -> bool:
        status = await self._acceptance.attach(stream, again=again)
        if status is AttachStatus.QUEUED_AGAIN:
            self._counts.num_restored_requests += 1
            logger.warning("request %s was ended while this gateway was cut off: it goes on", stream.request_id)
        if stream not in self._streams:
            self._withdrawals.add(stream)  # released meanwhile
        return bool(status)

    async def _catch_up(self) -> None:
        quiet_since = self._clock() - self._quiet_seconds
        due = [
            stream
            for stream in self._streams
            if stream.is_accepted and not stream.lags and (stream.is_behind or stream.last_heard <= quiet_since)
        ]
        for stream in due:
            if stream.terms and stream.last_heard <= quiet_since:
                with self._only(stream):
                    await self._attach(stream, again=True)  # the worker may not know of this gateway, or it was ended
        for start in range(0, len(due), BATCH_REQUESTS):
            await self._read_journals(due[start : start + BATCH_REQUESTS])

    async def _read_journals(self, streams: list[ResponseStream]) -> None:
        self._counts.num_journal_reads += len(streams)
        epochs = [stream.epoch for stream in streams]
        replies = await self._archive.read([stream.request_id for stream in streams], STORED_END)
        for stream, epoch, (stored, journal) in zip(streams, epochs, replies, strict=True):
            with self._only(stream):
                await self._take_journal(stream, epoch, stored, journal)

    async def _take_journal(self, stream: ResponseStream, epoch: int, stored: Any, journal: Any) -> None:
        for reply in (stored, journal):
            if isinstance(reply, RedisError) and is_transient(reply):
                raise reply
        stream.last_heard = self._clock()
        if stream.epoch != epoch:
            return  # what was read is no more; it is behind
        if is_missing(stored):
            await self._restore(stream)
            return
        stream.is_behind = False
        self._calls.own(self._replay_alone(stream, epoch, stored, journal))  # nobody waits for another's long journal
        if stream.is_set_aside:
            await self._acceptance.publish_mark(stream)  # the one before was lost, or is on its way

    @contextmanager
    def _only(self, stream: ResponseStream) -> Iterator[None]:
        """An error that a repeat cannot help ends this stream, and is counted."""
        try:
            yield
        except Exception as error:
            if is_transient(error):
                raise
            self._counts.num_message_errors += 1
            logger.exception("request %s failed", stream.request_id)
            self._streams.fail(stream)

    async def _replay_alone(self, stream: ResponseStream, epoch: int, stored: Any, journal: Any) -> None:
        with self._only(stream):
            await self._replay(stream, epoch, stored, journal)

    async def _replay(self, stream: ResponseStream, epoch: int, stored: Any, journal: Any) -> None:
        try:
            answer = await self._archive.decoded(stream.request, stored, journal, stream.num_known)
            if stream.epoch != epoch:
                return  # that journal is no more
            if needs_of(stream.request) and was_refused_as_unreadable(answer[1]):
                await self._submit_to_newer(stream)
                return
            is_behind = stream.is_behind  # by what was heard meanwhile
            stream.offer_journal(*answer)
            stream.is_behind |= is_behind
            if stream.is_torn:
                await self._mend(stream)
        except FormatError as error:
            logger.error("request %s cannot be read back: %s", stream.request_id, error)
            stream.end(ErrorEvent(stream.request_id, ErrorCode.REQUEST_FAILED, "the stored answer is unreadable"))
            self._withdrawals.add(stream)
        self._streams.settle(stream)

    async def _restore(self, stream: ResponseStream) -> None:
        """The store lost the request, unless it had ended: then it has expired, and nothing is left to be done."""
        if stream not in self._streams:
            return  # cancelled or ended meanwhile
        if stream.had_ended:
            event = ErrorEvent(stream.request_id, ErrorCode.REQUEST_FAILED, "the stored answer is no longer kept")
            self._streams.end(stream, event)
            return
        await self._accept_anew(stream)
        self._counts.num_restored_requests += 1
        logger.warning("request %s was lost by the store and is accepted anew", stream.request_id)

    async def _mend(self, stream: ResponseStream) -> None:
        """Torn: the store lost the end of its journal, and a worker went on otherwise. The request is taken back and
        given to the store with the tokens that its reader has, to go on behind them. Where that cannot be, the answer
        is in the store as it ended, or as others read it: this reader alone gets an error."""
        stream.is_behind = True  # until this is done: a reply may be lost
        was_taken_back = await self._acceptance.take_back(stream)
        self._counts.num_torn_streams += 1
        if was_taken_back:
            await self._accept_anew(stream)
        else:
            self._streams.end(stream, ErrorEvent(stream.request_id, ErrorCode.REQUEST_FAILED, TORN_MESSAGE))

    async def _submit_to_newer(self, stream: ResponseStream) -> None:
        """A worker older than the request's needs read it before this gateway knew of the worker."""
        stream.is_behind = True  # until this is done: a reply may be lost
        if self._acceptance.can_serve(stream.request):
            await self._acceptance.forget(stream)
            await self._accept_anew(stream)
        else:
            event = ErrorEvent(stream.request_id, ErrorCode.QUEUE_TIMEOUT, NEEDS_NEWER_MESSAGE)
            self._streams.end(stream, event)

    async def _accept_anew(self, stream: ResponseStream) -> None:
        self._streams.set_aside(stream)
        await self._acceptance.restore(stream)
        if stream not in self._streams:
            self._withdrawals.add(stream)  # released meanwhile
