"""The gateway's only Redis code: requests in, ordered token streams out.

    client = InferenceClient(connect(url), RedisKeys("model name"), gateway_id)
    await client.start()
    stream = await client.submit(request)      # the HTTP 200 goes out only after this returned; submit_all() of several
    async for event in stream: ...             # TokenEvents in order, each index once, then one FinishEvent|ErrorEvent
    await client.release(stream)               # required if the reader leaves early; it sees FinishEvent(CANCELLED)
    await client.close()

Pub/sub is the fast path and may lose anything; the journal is the truth. One task listens and never waits for the
store; another reads journals, for streams with a hole, after every (re)subscribe, and after 2 s of quiet. It also gives
the store back what it lost: a request whose hash is gone, though nobody cancelled it, is accepted anew with the tokens
already sent.
A request that is submitted with a Keep can be attached to, here and at other gateways, while it runs and after its end;
it is cancelled when the last of its holders lets go.
No Redis call runs in a request's own task: a cancelled handler must not leave a reply behind for the next caller.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from itertools import groupby, zip_longest
from operator import attrgetter
from typing import Any, TypeVar

from redis.exceptions import RedisError

from gateway.store.acceptance import Acceptance
from gateway.store.fleet import Fleet, WorkerStatus
from gateway.store.held_answers import HeldAnswers
from gateway.store.kv_watch import KVWatch
from gateway.store.overdue import OverdueRequests
from gateway.store.queue_stats import QueueStats, read_queue_stats, timed_write
from gateway.store.request_archive import RequestArchive
from gateway.store.response_stream import ResponseStream, cancelled_event
from gateway.store.store_calls import (
    InferenceError,
    QueueFull,
    Refused,
    RequestGone,
    ShareFull,
    StoreCalls,
    StoreUnavailable,
)
from gateway.store.store_memory import StoreMemory
from gateway.store.stored_request import STORED_END, is_missing
from gateway.store.stream_table import StreamTable
from gateway.store.withdrawals import Withdrawals
from shared.fleet_clock import FleetClock
from shared.messages import (
    ErrorCode,
    ErrorEvent,
    FinishReason,
    FormatError,
    GenerationRequest,
    StreamEvent,
    TerminalEvent,
    decode_event_batch,
    decode_heartbeat,
)
from shared.new_requests import Keep, Share
from shared.redis_client import RedisConnections
from shared.redis_keys import RedisKeys
from shared.redis_scripts import AttachStatus, NameTaken, RedisScripts
from shared.subscription import GAP, Message, Subscription

__all__ = [
    "InferenceClient", "InferenceError", "Keep", "NameTaken", "QueueFull", "QueueStats", "RequestGone",
    "ResponseStream", "Share", "ShareFull", "StoreUnavailable", "WorkerStatus",
]  # fmt: skip

QUIET_SECONDS = 2.0
RECOVERY_TICK_SECONDS = 0.5
RECOVERY_BATCH_REQUESTS = 64
CLOSE_SECONDS = 2.0

logger = logging.getLogger(__name__)
_request_id = attrgetter("request_id")
_Result = TypeVar("_Result")


class InferenceClient:
    def __init__(
        self,
        connections: RedisConnections,
        keys: RedisKeys,
        gateway_id: str,
        *,
        max_queued_requests: int = 1024,
        max_queued_tokens: int | None = None,
        quiet_seconds: float = QUIET_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """One client per served model; `max_queued_requests` is the cap of each priority class, and
        `max_queued_tokens` that of the prompts that this gateway alone has waiting.

        The connections stay the caller's: close them after this client.
        """
        self._redis = connections.commands
        self._scripts = RedisScripts(connections.commands, keys)
        self._keys = keys
        self._gateway_id = gateway_id
        self._quiet_seconds = quiet_seconds
        self._clock = clock
        self._fleet = Fleet(clock)
        self.store_memory = StoreMemory()
        self.kv = KVWatch(connections, keys)
        self._streams = StreamTable()
        self._acceptance = Acceptance(gateway_id, max_queued_requests, max_queued_tokens)
        self._held = HeldAnswers()
        self._withdrawals = Withdrawals(self._scripts)
        self._fleet_clock = FleetClock(self._scripts, clock)
        self._overdue = OverdueRequests(self._scripts, self._fleet_clock)
        channels = [keys.gateway_channel(gateway_id), keys.heartbeat_channel]
        self._subscription = Subscription(connections.subscriber, channels, clock=clock)
        self._recover_now = asyncio.Event()
        self._calls = StoreCalls()
        self.archive = RequestArchive(connections.commands, keys, self._calls)
        self.num_bad_messages = 0
        self.num_journal_reads = 0
        self.num_restored_requests = 0
        self.num_gaps = 0
        self.num_torn_streams = 0

    async def start(self) -> None:
        """Start the owner tasks; returns at once, also while the store is away."""
        self._calls.own(self._listen())
        self._calls.own(self._recover())
        self._calls.own(self._fleet_clock.run())
        self._calls.own(self.store_memory.watch(self._redis))

    async def close(self) -> None:
        """Withdraw what still runs, but for what is kept, and end the owner tasks."""
        self._held.clear()
        for stream in self._streams:
            self._end_locally(stream, cancelled_event(stream), withdraw=stream.keep is None)
        await self._calls.try_within(CLOSE_SECONDS, self._withdrawals.send())
        await self._calls.aclose()
        await self.kv.aclose()
        await self._subscription.aclose()
        self.archive.close()

    async def submit(self, request: GenerationRequest, *, keep: Keep | None = None) -> ResponseStream:
        """submit_all() of one."""
        (stream,) = await self.submit_all([request], [keep] if keep else [])
        return stream

    async def submit_all(
        self, requests: Sequence[GenerationRequest], keeps: Sequence[Keep] = (), share: Share | None = None
    ) -> list[ResponseStream]:
        """Store the requests of one answer, all or none; `keeps`: one each, if it is kept; `share`: what their key may
        hold. Raises QueueFull, ShareFull, StoreUnavailable or NameTaken; safe to cancel (they are withdrawn then)."""
        self._acceptance.check_room(self._streams.num_waiting_tokens, requests)
        # Before ACCEPT: a worker may be faster than our reply.
        streams = [self._open(request, keep) for request, keep in zip_longest(requests, keeps)]
        await self._opened(streams, self._acceptance.accept(self._scripts, streams, share))
        for stream in streams:
            stream.is_accepted = True
        self._held.add(streams)
        return streams

    async def attach_all(self, requests: Sequence[GenerationRequest], keeps: Sequence[Keep]) -> list[ResponseStream]:
        """Read the requests of a kept answer, each from its first token; each `keep.holder` is a new one. What had
        ended in the store before says so (`had_ended`). Raises StoreUnavailable, or RequestGone for one that is there
        no more; safe to cancel."""
        streams = [self._open(request, keep) for request, keep in zip(requests, keeps, strict=True)]
        await self._opened(streams, self._attach_all(streams))
        for stream in streams:
            stream.is_accepted = True
        self._held.add(streams)
        return streams

    async def release(
        self, stream: ResponseStream, reason: FinishReason = FinishReason.CANCELLED, ended_at: int = 0
    ) -> None:
        """Let go of a request that has not ended: it ends for this `reason`, unless somebody else holds it, and at this
        time (Unix seconds).

        Never raises for the store: repeated until it answers."""
        if stream in self._streams:
            self._end_locally(stream, cancelled_event(stream, reason, ended_at), withdraw=True)
            await asyncio.shield(self._calls.own(self._withdrawals.send()))

    async def cancel(self, request: GenerationRequest) -> None:
        """End a request, whoever holds it. Never raises for the store: repeated until it answers."""
        self._withdrawals.add_request(request)
        for stream in self._streams.of(request.request_id):
            self._end_locally(stream, cancelled_event(stream), withdraw=False)
        await asyncio.shield(self._calls.own(self._withdrawals.send()))

    async def fleet_seconds(self) -> float:
        """Now, on the clock of deadlines. Raises StoreUnavailable."""
        if not self._fleet_clock.is_set:
            await self._calls.ask(self._fleet_clock.tick())
        return self._fleet_clock.now()

    @property
    def fleet(self) -> list[WorkerStatus]:
        """Workers (and "supervisor") heard within the last 60 s, by worker id."""
        return self._fleet.snapshot()

    @property
    def last_ready(self) -> WorkerStatus | None:
        """Who was the last to say that it is ready, however long ago; None: nobody has yet."""
        return self._fleet.last_ready

    @property
    def num_repeated_tokens(self) -> int:
        return self._streams.num_repeated_tokens

    async def queue_stats(self) -> QueueStats:
        """Raises StoreUnavailable."""
        return await self._calls.ask(read_queue_stats(self._redis, self._keys))

    async def write_probe(self) -> float:
        """Seconds that one write took; raises StoreUnavailable. A PING would still answer when writes are refused."""
        return await self._calls.ask(timed_write(self._redis, self._keys, self._clock))

    def _open(self, request: GenerationRequest, keep: Keep | None) -> ResponseStream:
        stream = ResponseStream(request, keep)
        stream.last_heard = self._clock()
        stream.on_caught_up = self._recover_now.set
        self._streams.add(stream)
        return stream

    async def _opened(self, streams: Sequence[ResponseStream], call: Coroutine[Any, Any, _Result]) -> _Result:
        """The reply; without one the streams are closed again, in the store too."""
        task = self._calls.own(call)
        try:
            return await asyncio.shield(task)
        except (NameTaken, Refused):
            self._streams.discard(*streams)
            raise
        except (asyncio.CancelledError, RedisError, OSError, InferenceError) as error:
            self._streams.discard(*streams)
            task.add_done_callback(lambda _: self._withdraw_all(streams))  # it may have been stored, now or later
            if isinstance(error, (RedisError, OSError)):
                raise StoreUnavailable(str(error)) from error
            raise

    def _end_locally(self, stream: ResponseStream, terminal: TerminalEvent, *, withdraw: bool) -> None:
        stream.end(terminal)
        self._streams.discard(stream)
        if withdraw:
            self._withdraw(stream, terminal)

    # -- calls of the store

    async def _attach_all(self, streams: Sequence[ResponseStream]) -> None:
        for stream in streams:
            if await self._attach(stream):
                self._mark_behind([stream])
                continue
            stream.had_ended = True
            ((stored, journal),) = await self.archive.read([stream.request_id], STORED_END)
            if is_missing(stored):
                raise RequestGone(stream.request_id)
            await self._replay(stream, stored, journal)

    async def _attach(self, stream: ResponseStream, *, again: bool = False) -> bool:
        assert stream.keep is not None
        status = await self._scripts.attach(stream.request_id, stream.keep.holder, self._gateway_id, again=again)
        if status is AttachStatus.QUEUED_AGAIN:
            self.num_restored_requests += 1
            logger.warning("request %s was ended while this gateway was cut off: it goes on", stream.request_id)
        if stream not in self._streams:
            self._withdraw(stream)  # released meanwhile
        return bool(status)

    def _withdraw_all(self, streams: Iterable[ResponseStream]) -> None:
        for stream in streams:
            self._withdraw(stream)

    def _withdraw(self, stream: ResponseStream, terminal: TerminalEvent | None = None) -> None:
        self._withdrawals.add(stream, terminal)
        self._recover_now.set()

    # -- the listening task

    async def _listen(self) -> None:
        while True:
            message = await self._subscription.get(timeout_seconds=1.0)
            if message is GAP:
                self.num_gaps += 1
                self._mark_behind(self._streams)
            elif isinstance(message, Message):
                self._understand(message)

    def _understand(self, message: Message) -> None:
        try:
            if message.channel == self._keys.heartbeat_channel:
                self._fleet.heard(decode_heartbeat(message.data))
            else:
                self._deliver(decode_event_batch(message.data).events)
        except FormatError as error:
            self.num_bad_messages += 1
            logger.warning("dropped a message on %s: %s", message.channel, error)
            if message.channel != self._keys.heartbeat_channel:
                self._mark_behind(self._streams)  # nobody knows whose tokens it held

    def _deliver(self, events: Iterable[StreamEvent]) -> None:
        """Request by request, so that all of one is done while the processor still has it at hand: with 1,000 streams
        a second pass over them costs 1 us a token more."""
        now = self._clock()
        for request_id, of_one in groupby(events, _request_id):
            its_events = list(of_one)
            for stream in self._streams.of(request_id):
                stream.last_heard = now
                for event in its_events:
                    stream.offer(event)
                self._settle(stream)
                stream.on_news()

    def _settle(self, stream: ResponseStream) -> None:
        if stream.has_ended:
            self._streams.discard(stream)
        elif stream.is_behind:
            self._recover_now.set()

    def _mark_behind(self, streams: Iterable[ResponseStream]) -> None:
        for stream in streams:
            stream.is_behind = True
        self._recover_now.set()

    # -- the recovering task

    async def _recover(self) -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(RECOVERY_TICK_SECONDS):
                    await self._recover_now.wait()
            self._recover_now.clear()
            try:
                await self._withdrawals.send()
                await self._held.prolong(self._scripts, self._clock())
                for stream, event in await self._overdue.end(self._streams):
                    self._end_locally(stream, event, withdraw=False)
                await self._catch_up()
            except (RedisError, OSError) as error:
                logger.warning("cannot read journals: %s", error)
                await asyncio.sleep(RECOVERY_TICK_SECONDS)

    async def _catch_up(self) -> None:
        quiet_since = self._clock() - self._quiet_seconds
        due = [
            stream
            for stream in self._streams
            if stream.is_accepted and not stream.lags and (stream.is_behind or stream.last_heard <= quiet_since)
        ]
        for stream in due:
            if stream.keep and stream.last_heard <= quiet_since:
                await self._attach(stream, again=True)  # the worker may not know of this gateway, or it was ended
        for start in range(0, len(due), RECOVERY_BATCH_REQUESTS):
            await self._read_journals(due[start : start + RECOVERY_BATCH_REQUESTS])

    async def _read_journals(self, streams: list[ResponseStream]) -> None:
        self.num_journal_reads += len(streams)
        replies = await self.archive.read([stream.request_id for stream in streams], STORED_END)
        for stream, (stored, journal) in zip(streams, replies, strict=True):
            stream.last_heard = self._clock()
            if is_missing(stored):
                await self._restore(stream)
            else:
                stream.is_behind = False
                self._calls.own(self._replay(stream, stored, journal))  # nobody waits for another's long journal

    async def _replay(self, stream: ResponseStream, stored: Any, journal: Any) -> None:
        try:
            answer = await self.archive.decoded(stream.request, stored, journal)
            is_behind = stream.is_behind  # by what was heard meanwhile
            stream.offer_journal(*answer)
            stream.is_behind |= is_behind
            if stream.is_torn:
                event = await self._acceptance.mend(self._scripts, stream)
                self.num_torn_streams += 1
                if event is not None:
                    self._end_locally(stream, event, withdraw=False)
        except FormatError as error:
            logger.error("request %s cannot be read back: %s", stream.request_id, error)
            stream.end(ErrorEvent(stream.request_id, ErrorCode.REQUEST_FAILED, "the stored answer is unreadable"))
            self._withdraw(stream)
        self._settle(stream)

    async def _restore(self, stream: ResponseStream) -> None:
        """The store lost the request, unless it had ended: then it has expired, and nothing is left to be done."""
        if stream not in self._streams:
            return  # cancelled or ended meanwhile
        if stream.had_ended:
            event = ErrorEvent(stream.request_id, ErrorCode.REQUEST_FAILED, "the stored answer is no longer kept")
            self._end_locally(stream, event, withdraw=False)
            return
        await self._acceptance.restore(self._scripts, stream)
        self.num_restored_requests += 1
        logger.warning("request %s was lost by the store and is accepted anew", stream.request_id)
        if stream not in self._streams:
            self._withdraw(stream)
