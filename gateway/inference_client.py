"""The gateway's only Redis code: requests in, ordered token streams out.

    client = InferenceClient(connect(url), RedisKeys("model name"), gateway_id)
    await client.start()
    stream = await client.submit(request)      # the HTTP 200 goes out only after this returned
    async for event in stream: ...             # TokenEvents in order, each index once, then one FinishEvent|ErrorEvent
    await client.cancel(request.request_id)    # required if the reader leaves early; it sees FinishEvent(CANCELLED)
    await client.close()

Pub/sub is the fast path and may lose anything; the journal is the truth. One task listens and never waits for the
store; another reads journals, for streams with a hole, after every (re)subscribe, and after 2 s of quiet. It also gives
the store back what it lost: a request whose hash is gone, though nobody cancelled it, is accepted anew with the tokens
already sent.
No Redis call runs in a request's own task: a cancelled handler must not leave a reply behind for the next caller.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import suppress
from typing import Any, TypeVar

from redis.exceptions import RedisError

from gateway.fleet import Fleet, WorkerStatus
from gateway.kv_watch import KVWatch
from gateway.queue_stats import QueueStats, read_queue_stats
from gateway.response_stream import ResponseStream, cancelled_event
from gateway.store_memory import StoreMemory
from shared.messages import (
    ErrorCode,
    ErrorEvent,
    FormatError,
    GenerationRequest,
    StoredChoice,
    StreamEvent,
    decode_event_batch,
    decode_heartbeat,
    decode_terminal_event,
    encode,
    journal_choices,
)
from shared.redis_client import RedisConnections, got_no_reply
from shared.redis_keys import RedisKeys
from shared.redis_scripts import AcceptStatus, RedisScripts
from shared.subscription import GAP, Message, Subscription
from shared.tasks import cancel_and_wait

__all__ = [
    "InferenceClient",
    "InferenceError",
    "QueueFull",
    "QueueStats",
    "ResponseStream",
    "StoreUnavailable",
    "WorkerStatus",
]

QUIET_SECONDS = 2.0
RECOVERY_TICK_SECONDS = 0.5
RECOVERY_BATCH_REQUESTS = 64
ACCEPT_ATTEMPTS = 3
CLOSE_SECONDS = 2.0
ACCEPT_RETRY_SECONDS = 0.1

logger = logging.getLogger(__name__)
_Result = TypeVar("_Result")


class InferenceError(Exception):
    """A request that was not accepted, or a store that does not answer."""


class QueueFull(InferenceError):
    """The queue of its class is at its cap (answer 429 with Retry-After)."""


class StoreUnavailable(InferenceError):
    """Redis does not answer or refuses writes (answer 503)."""


class InferenceClient:
    def __init__(
        self,
        connections: RedisConnections,
        keys: RedisKeys,
        gateway_id: str,
        *,
        max_queued_requests: int = 1024,
        quiet_seconds: float = QUIET_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """One client per served model; `max_queued_requests` is the cap of each priority class.

        The connections stay the caller's: close them after this client.
        """
        self._redis = connections.commands
        self._scripts = RedisScripts(connections.commands, keys)
        self._keys = keys
        self._gateway_id = gateway_id
        self._max_queued_requests = max_queued_requests
        self._quiet_seconds = quiet_seconds
        self._clock = clock
        self._fleet = Fleet(clock)
        self.store_memory = StoreMemory()
        self.kv = KVWatch(connections, keys)
        self._streams: dict[str, ResponseStream] = {}
        self._withdrawn: dict[str, str] = {}  # request id -> priority class: still to be cancelled in the store
        channels = [keys.gateway_channel(gateway_id), keys.heartbeat_channel]
        self._subscription = Subscription(connections.subscriber, channels, clock=clock)
        self._recover_now = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()
        self.num_bad_messages = 0
        self.num_journal_reads = 0
        self.num_restored_requests = 0

    async def start(self) -> None:
        """Start the owner tasks; returns at once, also while the store is away."""
        self._own(self._listen())
        self._own(self._recover())
        self._own(self.store_memory.watch(self._redis))

    async def close(self) -> None:
        """Withdraw what still runs and end the owner tasks."""
        for stream in list(self._streams.values()):
            self._end_locally(stream)
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_SECONDS):
                await asyncio.shield(self._own(self._cancel_withdrawn()))
        await cancel_and_wait(self._tasks)
        await self.kv.aclose()
        await self._subscription.aclose()

    async def submit(self, request: GenerationRequest, *, owner_key_hash: str = "") -> ResponseStream:
        """Store the request. Raises QueueFull or StoreUnavailable; safe to cancel (the request is withdrawn)."""
        stream = ResponseStream(request)
        stream.last_heard = self._clock()
        self._streams[request.request_id] = stream  # before ACCEPT: a worker may be faster than our reply
        task = self._own(self._accept(request, owner_key_hash))
        try:
            status = await asyncio.shield(task)
        except (asyncio.CancelledError, StoreUnavailable):
            self._streams.pop(request.request_id, None)
            task.add_done_callback(lambda _: self._withdraw(request))  # it may have been stored, now or later
            raise
        if status is AcceptStatus.BUSY:
            self._streams.pop(request.request_id, None)
            raise QueueFull(f"{self._max_queued_requests} requests of class {request.priority_class} are queued")
        stream.is_accepted = True
        return stream

    async def generate(self, request: GenerationRequest, *, owner_key_hash: str = "") -> AsyncIterator[StreamEvent]:
        """submit + iterate, and cancel when the reader leaves early (close the generator then)."""
        stream = await self.submit(request, owner_key_hash=owner_key_hash)
        try:
            async for event in stream:
                yield event
        finally:
            await self.cancel(request.request_id)

    async def cancel(self, request_id: str) -> None:
        """Withdraw a request that has not ended. Never raises for the store: repeated until it answers."""
        if stream := self._streams.get(request_id):
            self._end_locally(stream)
            await asyncio.shield(self._own(self._cancel_withdrawn()))

    @property
    def fleet(self) -> list[WorkerStatus]:
        """Workers (and "supervisor") heard within the last 60 s, by worker id."""
        return self._fleet.snapshot()

    async def queue_stats(self) -> QueueStats:
        """Raises StoreUnavailable."""
        return await self._ask(read_queue_stats(self._redis, self._keys))

    async def write_probe(self) -> float:
        """Seconds that one write took; raises StoreUnavailable. A PING would still answer when writes are refused."""
        started = self._clock()
        await self._ask(self._write())
        return self._clock() - started

    def _end_locally(self, stream: ResponseStream) -> None:
        stream.end(cancelled_event(stream))
        self._withdrawn[stream.request_id] = stream.request.priority_class
        del self._streams[stream.request_id]

    # -- calls of the store, each in a task of its own

    def _own(self, call: Coroutine[Any, Any, _Result]) -> "asyncio.Task[_Result]":
        task = asyncio.create_task(call)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: "asyncio.Task[Any]") -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, (InferenceError, RedisError, OSError)):
            logger.critical("a task of the inference client failed", exc_info=error)

    async def _ask(self, call: Coroutine[Any, Any, _Result]) -> _Result:
        try:
            return await asyncio.shield(self._own(call))
        except (RedisError, OSError) as error:
            raise StoreUnavailable(str(error)) from error

    async def _write(self) -> None:
        await self._redis.set(self._keys.write_probe, b"1")

    async def _accept(self, request: GenerationRequest, owner_key_hash: str) -> AcceptStatus:
        body = encode(request)
        for attempts_left in reversed(range(ACCEPT_ATTEMPTS)):
            try:
                return await self._scripts.accept(
                    request.request_id,
                    body,
                    gateway_id=self._gateway_id,
                    priority_class=request.priority_class,
                    owner_key_hash=owner_key_hash,
                    max_queued=self._max_queued_requests,
                )
            except (RedisError, OSError) as error:
                if not attempts_left or not got_no_reply(error):
                    raise StoreUnavailable(str(error)) from error
                await asyncio.sleep(ACCEPT_RETRY_SECONDS)
        raise AssertionError("the last attempt returns or raises")

    def _withdraw(self, request: GenerationRequest) -> None:
        self._withdrawn[request.request_id] = request.priority_class
        self._recover_now.set()

    async def _cancel_withdrawn(self) -> None:
        with suppress(RedisError, OSError):  # what is left is tried again by the recovery task
            for request_id, priority_class in list(self._withdrawn.items()):
                await self._scripts.cancel(request_id, priority_class)
                self._withdrawn.pop(request_id, None)

    # -- the listening task

    async def _listen(self) -> None:
        while True:
            message = await self._subscription.get(timeout_seconds=1.0)
            if message is GAP:
                self._mark_behind(self._streams.values())
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
                self._mark_behind(self._streams.values())  # nobody knows whose tokens it held

    def _deliver(self, events: Iterable[StreamEvent]) -> None:
        now = self._clock()
        for event in events:
            stream = self._streams.get(event.request_id)
            if stream is None:
                continue
            stream.last_heard = now
            stream.offer(event)
            self._settle(stream)

    def _settle(self, stream: ResponseStream) -> None:
        if stream.has_ended:
            self._streams.pop(stream.request_id, None)
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
                await self._cancel_withdrawn()
                await self._catch_up()
            except (RedisError, OSError) as error:
                logger.warning("cannot read journals: %s", error)
                await asyncio.sleep(RECOVERY_TICK_SECONDS)

    async def _catch_up(self) -> None:
        quiet_since = self._clock() - self._quiet_seconds
        due = [
            stream
            for stream in self._streams.values()
            if stream.is_accepted and (stream.is_behind or stream.last_heard <= quiet_since)
        ]
        for start in range(0, len(due), RECOVERY_BATCH_REQUESTS):
            await self._read_journals(due[start : start + RECOVERY_BATCH_REQUESTS])

    async def _read_journals(self, streams: list[ResponseStream]) -> None:
        self.num_journal_reads += len(streams)
        async with self._redis.pipeline(transaction=False) as pipeline:
            for stream in streams:
                # The hash first: if it tells the end, the journal read after it is whole.
                pipeline.hmget(self._keys.request(stream.request_id), ["state", "terminal"])
                pipeline.get(self._keys.journal(stream.request_id))
            replies = await pipeline.execute(raise_on_error=False)
        for stream, stored, journal in zip(streams, replies[::2], replies[1::2], strict=True):
            stream.last_heard = self._clock()
            if isinstance(stored, list) and stored[0] is None:
                await self._restore(stream)
            else:
                self._replay(stream, stored, journal)

    def _replay(self, stream: ResponseStream, stored: Any, journal: Any) -> None:
        try:
            stream.offer_journal(*_stored_answer(stream.request, stored, journal))
        except FormatError as error:
            logger.error("request %s cannot be read back: %s", stream.request_id, error)
            stream.end(ErrorEvent(stream.request_id, ErrorCode.REQUEST_FAILED, "the stored answer is unreadable"))
            self._withdraw(stream.request)
        self._settle(stream)

    async def _restore(self, stream: ResponseStream) -> None:
        """The store lost the request: accept it anew, whatever the queue's cap, behind the tokens already sent."""
        if self._streams.get(stream.request_id) is not stream:
            return  # cancelled or ended meanwhile
        await self._scripts.accept(
            stream.request_id,
            encode(stream.request),
            gateway_id=self._gateway_id,
            priority_class=stream.request.priority_class,
            journal=b"".join(map(encode, stream.frames)),
        )
        self.num_restored_requests += 1
        logger.warning("request %s was lost by the store and is accepted anew", stream.request_id)
        if self._streams.get(stream.request_id) is not stream:
            self._withdraw(stream.request)


def _stored_answer(request: GenerationRequest, stored: Any, journal: Any) -> tuple[list[StoredChoice], Any]:
    for reply in (stored, journal):
        if isinstance(reply, Exception):
            raise FormatError(str(reply)) from reply
    choices = journal_choices(journal or b"", request.sampling.n)
    if stored[0] != b"done":
        return choices, None
    terminal = decode_terminal_event(stored[1] or b"")
    if terminal.request_id != request.request_id:
        raise FormatError(f"the stored end is that of {terminal.request_id}")
    return choices, terminal
