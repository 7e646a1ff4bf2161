"""An engine inside the gateway's process: it answers by a script, or event by event as a test sends them."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager

from gateway.fleet import WorkerStatus, ready_workers
from gateway.store.store_probe import QueueLoad, QueueStats, StoreMemory
from gateway.store.stream_table import DeliveryCounts, StreamTable
from gateway.work.owner_tasks import OwnerTasks
from shared.kv_snapshot import KVSnapshot
from shared.messages import (
    EncodedLogprobs,
    FinishEvent,
    FinishReason,
    GenerationRequest,
    StreamEvent,
    TokenEvent,
    Usage,
    WorkerHeartbeat,
    WorkerPhase,
    scores_by_index,
)
from shared.new_requests import RetentionTerms, Share

Script = Callable[[GenerationRequest], Iterable[StreamEvent]]


def heartbeat(worker_id: str = "w.1", phase: WorkerPhase = WorkerPhase.READY, **fields: object) -> WorkerHeartbeat:
    return WorkerHeartbeat(worker_id=worker_id, phase=phase, **fields)  # type: ignore[arg-type]


def says(*token_groups: list[int], reason: FinishReason = FinishReason.STOP) -> Script:
    """Return a script in which every choice says the same: one TokenEvent per group, then the end."""

    def script(request: GenerationRequest) -> Iterable[StreamEvent]:
        index, n = 0, request.sampling.n
        for group in token_groups:
            for choice in range(n):
                yield TokenEvent(request.request_id, index, group, choice)
            index += len(group)
        if n > 1:
            for choice in range(n):
                yield TokenEvent(request.request_id, index, [], choice, reason)
        yield finish(request, n * index, reason)

    return script


def finish(request: GenerationRequest, num_tokens: int, reason: FinishReason = FinishReason.STOP) -> FinishEvent:
    usage = Usage(prompt_tokens=len(request.prompt_token_ids), completion_tokens=num_tokens)
    return FinishEvent(request.request_id, reason, usage)


class FakeStream:
    def __init__(self, request: GenerationRequest) -> None:
        self.request = request
        self.prompt_logprobs: dict[int, EncodedLogprobs] = {}
        self.on_ready: Callable[[], None] = lambda: None
        self._events: deque[StreamEvent] = deque()

    @property
    def request_id(self) -> str:
        return self.request.request_id

    def send(self, event: StreamEvent) -> None:
        if isinstance(event, TokenEvent):
            self.prompt_logprobs |= scores_by_index(event.prompt_logprobs)
        self._events.append(event)
        self.on_ready()

    def read(self) -> StreamEvent | None:
        return self._events.popleft() if self._events else None


class FakeKVWatch:
    """Watchers receive what a test puts into `snapshots`."""

    def __init__(self) -> None:
        self.snapshots: asyncio.Queue[KVSnapshot] = asyncio.Queue()
        self.num_watchers = 0

    @asynccontextmanager
    async def into(self, queue: asyncio.Queue[KVSnapshot]) -> AsyncIterator[None]:
        self.num_watchers += 1
        moving = asyncio.create_task(self._move(queue))
        try:
            yield
        finally:
            moving.cancel()
            self.num_watchers -= 1

    async def _move(self, queue: asyncio.Queue[KVSnapshot]) -> None:
        while True:
            await queue.put(await self.snapshots.get())


class FakeLimits:
    """No other gateway spends anything."""

    async def begin(self, account: object, *, generates: bool) -> None: ...

    async def share(self, accounts: object) -> None:
        await asyncio.Event().wait()


class FakeInferenceClient:
    """Without a script, a test gets each stream from `next_stream()` and sends the events itself."""

    def __init__(self, script: Script | None = None) -> None:
        self.script = script
        self.counts = DeliveryCounts()
        self.streams = StreamTable(asyncio.Event())
        self.requests: list[GenerationRequest] = []
        self.cancelled: list[str] = []
        self._last_ready: WorkerHeartbeat | None = None
        self.workers = [heartbeat()]
        self.seconds_without_worker = 0.0  # since a worker was ready
        self.submit_error: Exception | None = None
        self.store_error: Exception | None = None
        self.store_memory = StoreMemory()
        self.was_served = self.store_is_young = False
        self.kv = FakeKVWatch()
        self.limits = FakeLimits()
        self.was_ready = asyncio.Event()
        self.submission = self.archive = self.probe = self.fleet = self.history = self
        self._new_streams: asyncio.Queue[FakeStream] = asyncio.Queue()
        self._cancellations: asyncio.Queue[str] = asyncio.Queue()

    async def start(self, owners: OwnerTasks | None = None) -> None: ...

    async def is_young(self) -> bool:
        return self.store_is_young

    async def close(self) -> None: ...

    def is_cut_off(self) -> bool:
        return False

    async def submit(self, request: GenerationRequest, *, terms: RetentionTerms | None = None) -> FakeStream:
        if self.submit_error is not None:
            raise self.submit_error
        self.requests.append(request)
        stream = FakeStream(request)
        if self.script is None:
            self._new_streams.put_nowait(stream)
        else:
            for event in self.script(request):
                stream.send(event)
        return stream

    async def submit_all(
        self,
        requests: Sequence[GenerationRequest],
        terms_of_each: Sequence[RetentionTerms] = (),
        share: Share | None = None,
    ) -> list[FakeStream]:
        return [await self.submit(request) for request in requests]

    async def release(
        self, stream: FakeStream, reason: FinishReason = FinishReason.CANCELLED, ended_at: int = 0
    ) -> None:
        request_id = stream.request.request_id
        self.cancelled.append(request_id)
        self._cancellations.put_nowait(request_id)
        stream.send(finish(stream.request, 0, FinishReason.CANCELLED))

    async def stored(self, request_ids: Iterable[str]) -> list[None]:
        """Return None: this engine stores nothing."""
        return [None for _ in request_ids]

    async def named(self, digest: str) -> None: ...

    async def forget(self, request_ids: Iterable[str], name: str) -> None: ...

    async def fleet_seconds(self) -> float:
        return 0.0

    async def next_stream(self) -> FakeStream:
        return await self._new_streams.get()

    async def next_cancellation(self) -> str:
        return await self._cancellations.get()

    @property
    def last_ready(self) -> WorkerStatus | None:
        """Return the last ready workers, as of the latest query."""
        for beat in self.workers:
            if beat.phase is WorkerPhase.READY and beat.worker_id != "supervisor":
                self._last_ready = beat
        return WorkerStatus(self._last_ready, self.seconds_without_worker) if self._last_ready else None

    @property
    def ready(self) -> list[WorkerHeartbeat]:
        return ready_workers(self.snapshot())

    def snapshot(self) -> list[WorkerStatus]:
        return [WorkerStatus(beat, 0.1) for beat in self.workers]

    async def queue_stats(self) -> QueueStats:
        if self.store_error is not None:
            raise self.store_error
        return QueueStats({"interactive": QueueLoad(4, 2, 1.5), "batch": QueueLoad(1, 0, 60.0)})

    async def write_seconds(self) -> float:
        if self.store_error is not None:
            raise self.store_error
        return 0.001
