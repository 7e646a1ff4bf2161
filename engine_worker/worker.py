"""The worker's main loop: claim -> engine.step() -> emit -> finish, until it drains.

    claim    waits on the queue while the engine steps; takes no more requests than the next steps can start
    step     runs in the engine's thread; a request joins the running batch between two steps
    emit     stores and publishes one step's tokens while the next step computes
    finish   acknowledges the requests that the step ended

A fenced worker (declared dead, or without a store reply for too long) drops every request, because another worker has
it, and registers a new Incarnation. An exception of the engine ends the worker: run() raises it.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass

from msgspec import structs

from engine_worker.engine_thread import EngineThread, Turn
from engine_worker.metrics import WorkerMetrics
from engine_worker.request_times import RequestClock
from engine_worker.transport.claims import ClaimedRequest
from engine_worker.transport.incarnation import Incarnation
from engine_worker.transport.request_stream import RequestStream
from engine_worker.transport.token_publisher import TokenPublisher
from shared.messages import ErrorEvent, FinishEvent, FinishReason, TokenEvent, Usage
from shared.redis_scripts import Fenced
from shared.tasks import cancel_and_wait, run_until_first_ends
from shared.ticks import next_tick

SHARE_SECONDS = 0.5  # between two comparisons with peers
MIN_TO_SHARE = 2  # requests; an idle peer gets half of them

logger = logging.getLogger("worker")

Register = Callable[[Incarnation | None], Awaitable[Incarnation]]  # previous -> next; waits for the store
Listen = Callable[[Incarnation, Callable[[str], None]], Coroutine[None, None, None]]  # with what to call for each


@dataclass(slots=True)
class ClaimedRequestState:
    claimed: ClaimedRequest
    num_output_tokens: int  # emitted by all choices, including earlier attempts
    is_lost: bool = False  # cancelled, or taken over; the engine is dropping it


@dataclass(frozen=True, slots=True)
class _Cancelled:
    """An outbox item: the request was cancelled."""

    request_id: str


@dataclass(frozen=True, slots=True)
class _Aborted:
    """An outbox item after the last Turn that may have events of this request."""

    request_id: str


class Worker:
    """Connects one engine with the store."""

    def __init__(
        self,
        engine: EngineThread,
        register: Register,
        listen: Listen,
        metrics: WorkerMetrics,
        drain_seconds: float,
        clock: RequestClock | None = None,
    ) -> None:
        self._engine = engine
        self._register = register
        self._listen = listen
        self._metrics = metrics
        self._clock = clock or RequestClock([metrics])
        self._drain_seconds = drain_seconds
        self._held: dict[str, ClaimedRequestState] = {}
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._holds = asyncio.Event()  # set when a request was claimed
        self._draining = asyncio.Event()
        self._outbox: asyncio.Queue[Turn | _Cancelled | _Aborted] = asyncio.Queue()

    def tenants(self) -> dict[str, str]:
        """Return the tenant of each held request, by id."""
        return {request_id: held.claimed.request.tenant for request_id, held in self._held.items()}

    def take_turn(self, turn: Turn) -> None:
        """Queue the events of a step for the store. The engine thread bounds how many steps can wait."""
        self._outbox.put_nowait(turn)

    def drain(self) -> None:
        """Stop claiming. run() returns when the held requests have ended, or after `drain_seconds`."""
        self._draining.set()

    async def run(self) -> None:
        """Serve until the worker has drained. Raises what the engine raises."""
        incarnation = await self._register_or_drain(None)
        while incarnation is not None and not await self._live(incarnation):
            await self._forget_everything()
            incarnation = await self._register_or_drain(incarnation)

    async def _register_or_drain(self, previous: Incarnation | None) -> Incarnation | None:
        """Register an incarnation. None: a drain was requested, and the previous one's requests were handed back."""
        registering = asyncio.ensure_future(self._register(previous))
        draining = asyncio.create_task(self._draining.wait())
        await asyncio.wait((registering, draining), return_when=asyncio.FIRST_COMPLETED)
        is_registered = registering.done()
        await cancel_and_wait([registering, draining])
        if is_registered:
            return registering.result()
        if previous is not None:
            await self._hand_back(previous)
        return None

    async def _live(self, incarnation: Incarnation) -> bool:
        """Serve as one incarnation. Return True when it has drained, False when it was fenced."""
        logger.info("worker: serving as %s", incarnation.worker_id)
        try:
            await run_until_first_ends(
                self._engine.wait_ended(),
                self._emit_turns(incarnation.tokens),
                self._listen(incarnation, self._on_cancel_hint),
                self._claim_until_drained(incarnation),
                self._share_what_waits(incarnation.requests),
                self._run_out_of_time(),
            )
        except Fenced as reason:
            logger.warning("worker %s: fenced; dropped %d requests: %s", incarnation.worker_id, len(self._held), reason)
            return False
        await self._hand_back(incarnation)
        return True

    async def _claim_until_drained(self, incarnation: Incarnation) -> None:
        requests = incarnation.requests
        while not self._draining.is_set():
            demand = await self._engine.wait_for_demand()
            if not self._draining.is_set():
                for claimed in await requests.claim(demand, block=demand.requests > 0):
                    self._metrics.took(claimed.home, incarnation.worker_id)
                    self._take(claimed)
        await self._is_idle.wait()

    async def _share_what_waits(self, requests: RequestStream) -> None:
        """Return requests that have not started to the queue, if a peer with room holds fewer and the queue is empty.

        Also return requests whose queue timeout passed while they waited for KV blocks; the next claim ends them.
        """
        while True:
            if not self._held:
                self._holds.clear()
                await self._holds.wait()
            await next_tick(SHARE_SECONDS)
            timed_out_ids = {request_id for request_id in requests.queue_timed_out() if self._has_no_token(request_id)}
            if timed_out_ids:
                await self._give_back(requests, await self._engine.withdraw(timed_out_ids))
            if self._draining.is_set() or requests.num_held < MIN_TO_SHARE:
                continue
            level = await requests.peers_level(self._engine.demand.room or 0)
            surplus = 0 if level is None else (requests.num_held - level) // 2
            if surplus > 0:
                await self._give_back(requests, await self._engine.withdraw_waiting(surplus))

    def _has_no_token(self, request_id: str) -> bool:
        held = self._held.get(request_id)
        return held is not None and not held.is_lost and not held.num_output_tokens

    async def _give_back(self, requests: RequestStream, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self._held.pop(request_id, None)
            self._clock.forget(request_id)
        await requests.unclaim(request_ids)
        self._metrics.gave_back(len(request_ids))
        if not self._held:
            self._is_idle.set()

    async def _run_out_of_time(self) -> None:
        await self._draining.wait()
        logger.info("drain: finishing %d requests, at most %g s", len(self._held), self._drain_seconds)
        await asyncio.sleep(self._drain_seconds)
        logger.info("drain: timeout reached; requeuing %d requests", len(self._held))
        await self._engine.drop_requests()
        await self._outbox.join()  # stores the tokens computed so far

    def _take(self, claimed: ClaimedRequest) -> None:
        self._held[claimed.request.request_id] = ClaimedRequestState(
            claimed, sum(len(choice.token_ids) for choice in claimed.stored)
        )
        self._is_idle.clear()
        self._holds.set()
        self._clock.claimed(claimed)
        self._engine.add_request(claimed.request, claimed.stored)

    async def _emit_turns(self, tokens: TokenPublisher) -> None:
        while True:
            item = await self._outbox.get()
            if isinstance(item, Turn):
                await self._emit(tokens, item)
            elif isinstance(item, _Cancelled):
                self._let_go([item.request_id])
            elif item.request_id in self._held:
                await self._finish(tokens, [self._cancelled_event(item.request_id)])
            self._outbox.task_done()

    async def _emit(self, tokens: TokenPublisher, turn: Turn) -> None:
        started_seconds = time.monotonic()
        held = self._held  # a local, because it is looked up per token
        events = [event for event in turn.events if (one := held.get(event.request_id)) and not one.is_lost]
        new_tokens = [event for event in events if isinstance(event, TokenEvent)]
        try:
            cancelled_ids = await tokens.emit(new_tokens)
            for event in new_tokens:
                self._held[event.request_id].num_output_tokens += len(event.token_ids)
            self._clock.stored(event.request_id for event in new_tokens if event.token_ids)
            ends = [end for end in events if not isinstance(end, TokenEvent) and end.request_id not in cancelled_ids]
            await self._finish(tokens, ends)
            self._let_go(cancelled_ids)
        finally:
            self._engine.acknowledge()
        if turn.step:
            self._metrics.observe_step(turn.step, time.monotonic() - started_seconds)

    async def _finish(self, tokens: TokenPublisher, ends: Sequence[FinishEvent | ErrorEvent]) -> None:
        if not ends:
            return
        await tokens.finish([_dated(end) for end in ends])
        for end in ends:
            del self._held[end.request_id]
            self._clock.ended(end.request_id, end.reason if isinstance(end, FinishEvent) else "error")
        if not self._held:
            self._is_idle.set()

    def _is_lost(self, request_id: str) -> bool:
        held = self._held.get(request_id)
        return held is None or held.is_lost

    def _let_go(self, request_ids: Sequence[str]) -> None:
        """Abort cancelled requests; they are finished once the engine can send no more of their events.

        Another attempt may follow, even here, and must not get tokens of this one.
        """
        for request_id in request_ids:
            if not self._is_lost(request_id):
                self._held[request_id].is_lost = True
                self._engine.abort_request(request_id, self._on_aborted)

    def _on_aborted(self, request_id: str) -> None:
        self._outbox.put_nowait(_Aborted(request_id))

    def _cancelled_event(self, request_id: str) -> FinishEvent:
        held = self._held[request_id]
        num_prompt_tokens = len(held.claimed.request.prompt_token_ids)
        usage = Usage(prompt_tokens=num_prompt_tokens, completion_tokens=held.num_output_tokens)
        return FinishEvent(request_id, FinishReason.CANCELLED, usage)

    def _on_cancel_hint(self, request_id: str) -> None:
        if request_id in self._held:
            self._outbox.put_nowait(_Cancelled(request_id))

    async def _forget_everything(self) -> None:
        await self._engine.drop_requests()
        while not self._outbox.empty():
            if isinstance(self._outbox.get_nowait(), Turn):
                self._engine.acknowledge()
        self._outbox = asyncio.Queue()  # a new one, because join() on the old one would wait forever
        self._held.clear()
        self._clock.forget_everything()
        self._is_idle.set()

    async def _hand_back(self, incarnation: Incarnation) -> None:
        """Requeue the held requests. Retry for `drain_seconds`; then peers do it after missed heartbeats."""
        try:
            await incarnation.requests.hand_back_within(self._drain_seconds)
        except Fenced:
            logger.warning("worker %s: fenced during the drain; peers have its requests", incarnation.worker_id)
        except TimeoutError:
            logger.warning(
                "worker %s: the store is unavailable; peers will requeue %d requests",
                incarnation.worker_id,
                len(self._held),
            )
        self._held.clear()


def _dated(end: FinishEvent | ErrorEvent) -> FinishEvent | ErrorEvent:
    """Add the Unix time of the end, which is only shown to clients."""
    return structs.replace(end, ended_at=int(time.time())) if isinstance(end, FinishEvent) else end
