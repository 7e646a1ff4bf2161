"""A real Worker with a fake model and a real store, stepped by the test.

Results are read from the store, as in a gateway's journal catch-up, so a lost pub/sub message cannot fail a test.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

from engine_worker.engine import Engine
from engine_worker.engine_thread import EngineThread
from engine_worker.metrics import WorkerMetrics
from engine_worker.request_times import RequestClock
from engine_worker.scheduling.batch import ScheduledBatch
from engine_worker.status import WorkerStatus
from engine_worker.transport.control_messages import listen
from engine_worker.transport.incarnation import Incarnation, register
from engine_worker.worker import Worker
from shared.fleet_clock import FleetClock
from shared.messages import (
    FinishEvent,
    GenerationRequest,
    TerminalEvent,
    decode_terminal_event,
    encode,
    journal_choices,
)
from shared.new_requests import NewRequest, Share
from shared.redis_client import RedisConnections
from shared.redis_keys import GROUP, RedisKeys
from shared.redis_scripts import RedisScripts
from shared.tasks import cancel_and_wait
from tests.builders import VOCAB_SIZE, FakeModelRunner, make_engine
from tests.patience import PATIENCE_SECONDS

FOREVER_STEPS = 20_000  # more than any test needs; a million semaphore permits would take 0.4 s per test


async def eventually(holds: Callable[[], Any]) -> None:
    """Wait until `holds()` is true. States of another thread or of the server have no event to wait for."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not holds():
            await asyncio.sleep(0.002)


class Gate:
    """Lets a given number of engine steps pass and records the request ids of each batch."""

    def __init__(self, num_steps: int) -> None:
        self.batches: list[set[str]] = []
        self._permits = threading.Semaphore(num_steps)
        self.failure: Exception | None = None

    def allow(self, num_steps: int = 1) -> None:
        self._permits.release(num_steps)

    def __call__(self, batch: ScheduledBatch) -> None:
        self.batches.append({scheduled.sequence.request_id for scheduled in batch.sequences})
        assert self._permits.acquire(timeout=PATIENCE_SECONDS), "the test never allowed this step"
        if self.failure is not None:
            raise self.failure


class WorkerHarness:
    def __init__(
        self,
        connections: RedisConnections,
        keys: RedisKeys,
        *,
        num_steps: int = FOREVER_STEPS,
        drain_seconds: float = PATIENCE_SECONDS,
        vocab_size: int = VOCAB_SIZE,
        clock: RequestClock | None = None,
        **engine: Any,
    ) -> None:
        """Create it inside the event loop. `num_steps`: steps that may run before the test allows more."""
        self.scripts = RedisScripts(connections.commands, keys)
        self.keys = keys
        self.gate = Gate(num_steps)
        self.engine: Engine = make_engine(
            FakeModelRunner(before_step=self.gate, vocab_size=vocab_size), vocab_size=vocab_size, **engine
        )
        self.thread = EngineThread()
        self.incarnations: list[str] = []
        self.hinted: list[str] = []
        self._connections = connections
        self.fleet_clock = FleetClock(self.scripts.tick)
        status = WorkerStatus("w", "0")
        metrics = WorkerMetrics("w", "m", "0", status)
        self.worker = Worker(self.thread, self._register, self._listen, metrics, drain_seconds, clock)
        self.running: asyncio.Task[None] | None = None

    @property
    def num_held(self) -> int:
        """Number of requests that the worker holds."""
        return len(self.worker.tenants())

    @asynccontextmanager
    async def serving(self) -> AsyncIterator["WorkerHarness"]:
        self.thread.start(self.engine, self.worker.take_turn)
        self.running = asyncio.create_task(self.worker.run())
        try:
            yield self
        finally:
            self.gate.allow(FOREVER_STEPS)
            await cancel_and_wait([self.running])
            with suppress(Exception):
                await self.thread.stop()

    async def submit(self, request: GenerationRequest, journal: bytes = b"") -> str:
        await self.scripts.accept(
            request.request_id, encode(request), gateway_id="g", priority_class="interactive", journal=journal
        )
        return request.request_id

    async def submit_all(self, *requests: GenerationRequest) -> None:
        """Submit all in one batch, for the API key of the first request's tenant."""
        new = [NewRequest(request.request_id, encode(request), num_prompt_tokens=1) for request in requests]
        share = Share(requests[0].tenant)
        await self.scripts.accept_all(new, gateway_id="g", priority_class="interactive", share=share)

    async def tokens(self, request_id: str) -> list[int]:
        stored: Any = await self.scripts.redis.get(self.keys.journal(request_id))
        return journal_choices(stored or b"", 1)[0].token_ids

    async def end(self, request_id: str) -> TerminalEvent:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while True:
                stored: Any = await self.scripts.redis.hget(self.keys.request(request_id), "terminal")
                if stored:
                    return decode_terminal_event(stored)
                await asyncio.sleep(0.002)

    async def finish(self, request_id: str) -> tuple[list[int], FinishEvent]:
        end = await self.end(request_id)
        assert isinstance(end, FinishEvent), end
        return await self.tokens(request_id), end

    async def until_hints_arrive(self) -> None:
        """Wait until the worker is subscribed to hints: earlier ones are lost, as the protocol allows."""
        channel = self.keys.control_channel(self.incarnations[-1])
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not (await self.scripts.redis.pubsub_numsub(channel))[0][1]:
                await asyncio.sleep(0.002)

    async def num_unacknowledged(self) -> int:
        """Return the number of entries in all queues, claimed or not."""
        return sum([await self.scripts.redis.xlen(queue) for queue in self.keys.queues])

    async def num_claimed(self) -> int:
        """Return the number of entries that a worker holds."""
        pending = [await self.scripts.redis.xpending(queue, GROUP) for queue in self.keys.queues]
        return sum(reply["pending"] for reply in pending)

    async def _register(self, previous: Incarnation | None) -> Incarnation:
        await self.fleet_clock.tick()
        incarnation = await register(self._connections, self.keys, "w", previous, fleet_clock=self.fleet_clock)
        self.incarnations.append(incarnation.worker_id)
        return incarnation

    async def _listen(self, incarnation: Incarnation, on_cancel: Callable[[str], None]) -> None:
        def on_hint(request_id: str) -> None:
            on_cancel(request_id)
            self.hinted.append(request_id)

        await listen(self._connections, self.keys, incarnation, on_hint)
