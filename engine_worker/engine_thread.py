"""The engine in its own thread: steps run while there is work; calls run between two steps.

Everything that uses the engine or the device runs here, including loading, so neither needs a lock. The events of each
step go to the event loop as a Turn, which stores and publishes them while the next step computes, and then calls
acknowledge(). Steps run at most MAX_STEPS_AHEAD of that: if the store is unavailable, the engine stops instead of
filling memory. A step may return the events of an earlier one; has_work stays true until all are returned.
"""

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from engine_worker.engine import Engine
from engine_worker.grammar_gate import Compile, GrammarGate
from engine_worker.scheduling.claim_budget import NO_CLAIMS, ClaimBudget
from engine_worker.scheduling.stats import EngineStats, StepStats
from shared.messages import GenerationRequest, StoredChoice, StreamEvent
from shared.redis_scripts import Demand

MAX_STEPS_AHEAD = 2  # one being stored and one waiting, which hides a round trip as long as a step

# How often a worker without room looks for requests of tenants that have none waiting here. Each look is a script of
# 20-40 us in the store.
OTHERS_SECONDS = 0.05

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class Turn:
    """The work of the engine since the previous Turn: a step, or only calls (then `step` is None)."""

    step: StepStats | None
    events: Sequence[StreamEvent]
    claim_budget: ClaimBudget
    background_claim_budget: ClaimBudget
    added_ids: Sequence[str] = ()  # requests added since the previous Turn, which `claim_budget` includes


class EngineThread:
    """The thread, used from the event loop except where stated otherwise."""

    def __init__(self) -> None:
        """Start the thread. Requires a running event loop."""
        self.num_steps = 0  # readable from any thread
        self.in_step = False  # readable from any thread
        self._loop = asyncio.get_running_loop()
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._engine: Engine | None = None
        self._deliver: Callable[[Turn], None] = lambda turn: None
        self._gate = GrammarGate(lambda grammar: None, self._pass_on)  # start() replaces it
        self._on_way: dict[str, GenerationRequest] = {}  # requests that no Turn reported as added yet
        self._latest_turn = Turn(None, (), NO_CLAIMS, NO_CLAIMS)
        self._turned = asyncio.Event()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._stats: tuple[EngineStats, tuple[int, int]] | None = None  # the last snapshot, and _work_done at its time
        # Used only in the thread:
        self._num_calls = 0
        self._steps_ahead = 0
        self._added_ids: list[str] = []
        self._stopping = False
        # A daemon, so that a hung step cannot keep the process from ending.
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def cpu_seconds(self) -> float:
        """CPU time of the thread, which does not advance while it waits."""
        if self._thread.ident is None or not self._thread.is_alive():
            return 0.0
        return time.clock_gettime(time.pthread_getcpuclockid(self._thread.ident))

    async def call(self, function: Callable[[], _Result]) -> _Result:
        """Run `function` between two steps. Its exceptions are raised here and do not end the thread."""
        future: Future[_Result] = Future()
        self._calls.put(partial(_complete, future, function))
        return await asyncio.wrap_future(future)

    def start(self, engine: Engine, deliver: Callable[[Turn], None], compile_grammar: Compile | None = None) -> None:
        """Start to step `engine`.

        Args:
            engine: The engine.
            deliver: Called in the event loop with each Turn that had a step, in order.
            compile_grammar: Called in another thread, per request with a grammar.
        """
        self._deliver = deliver
        if compile_grammar is not None:
            self._gate = GrammarGate(compile_grammar, self._pass_on)
        self._calls.put(partial(setattr, self, "_engine", engine))

    def add_request(self, request: GenerationRequest, stored: Sequence[StoredChoice]) -> None:
        """Add a request, which runs from the next step on, or once its grammar is compiled."""
        self._on_way[request.request_id] = request
        self._gate.add(request, stored)

    def abort_request(self, request_id: str, aborted: Callable[[str], None]) -> None:
        """Abort a request before the next step, and free its blocks.

        `aborted` is called after the delivery of every Turn that may have its events.
        """
        if self._gate.drop(request_id):
            del self._on_way[request_id]
            aborted(request_id)
        else:
            self._calls.put(partial(self._abort_request, request_id, aborted))

    def acknowledge(self) -> None:
        """Report that the events of one more step are stored."""
        self._calls.put(self._acknowledge)

    async def drop_requests(self) -> None:
        """Abort all requests. On return, every earlier Turn has been delivered, and no step has work."""
        for request_id in self._gate.drop_all():
            del self._on_way[request_id]
        await self.call(self._drop_requests)

    async def stats(self) -> EngineStats:
        """Return the engine's counts. While the engine is idle they are cached, and its thread is not woken."""
        if self._stats is None or self._stats[1] != self._work_done or self.in_step or not self._calls.empty():
            self._stats = await self.call(lambda: (self._running_engine().stats(), self._work_done))
        return self._stats[0]

    @property
    def _work_done(self) -> tuple[int, int]:
        return self._num_calls, self.num_steps

    async def kv_view(self) -> dict[str, Any]:
        return await self.call(lambda: self._running_engine().kv_view())

    async def kv_events(self, since: int) -> dict[str, Any]:
        return await self.call(lambda: self._running_engine().kv_events(since))

    async def wait_for_demand(self) -> Demand:
        """Wait until at least one request should be claimed for the next two steps, and return the demand.

        Without room, return every OTHERS_SECONDS a demand for requests of other tenants.
        """
        look_at = self._loop.time() + OTHERS_SECONDS
        while (demand := self.demand).requests <= 0:
            if self._loop.time() >= look_at:
                if demand.others:
                    return demand
                look_at = self._loop.time() + OTHERS_SECONDS
            self._turned.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout_at(look_at):
                    await self._turned.wait()
        return demand

    @property
    def demand(self) -> Demand:
        """The requests to claim now, after those that are on their way to the engine."""
        on_way = self._on_way.values()
        num, num_tokens = len(on_way), sum(len(request.prompt_token_ids) for request in on_way)
        claim_budget, background_claim_budget = (
            self._latest_turn.claim_budget,
            self._latest_turn.background_claim_budget,
        )
        num_requests = claim_budget.max_requests(num, num_tokens)
        return Demand(
            requests=num_requests,
            background_requests=background_claim_budget.num_wanted(num, num_tokens),
            prompt_tokens=claim_budget.num_wanted_tokens(num_tokens),
            likely_prompt_tokens=claim_budget.likely_prompt_tokens,
            room=max(0, claim_budget.room - num),
            background_room=max(0, background_claim_budget.room - num),
            others=0 if num_requests else max(0, claim_budget.num_others - num),
            waiting_tenants=claim_budget.waiting_tenants.union(request.tenant for request in on_way),
        )

    async def withdraw_waiting(self, max_requests: int) -> list[str]:
        """Drop requests that have not started, without an event. Return their ids."""
        return await self.call(lambda: self._running_engine().withdraw_waiting(max_requests))

    async def withdraw(self, request_ids: Collection[str]) -> list[str]:
        """Drop those of these requests that have not started, without an event. Return their ids."""
        return await self.call(lambda: self._running_engine().withdraw(request_ids))

    async def wait_ended(self) -> None:
        """Wait for stop(). Raises what a step raised."""
        await asyncio.shield(self._ended)

    async def stop(self) -> None:
        """End the thread after the current step."""
        self._calls.put(partial(setattr, self, "_stopping", True))
        await self.wait_ended()

    def _pass_on(self, request: GenerationRequest, stored: Sequence[StoredChoice], problem: str) -> None:
        self._calls.put(partial(self._add_request, request, stored, problem))

    def _take_turn(self, turn: Turn) -> None:
        self._latest_turn = turn
        for request_id in turn.added_ids:
            self._on_way.pop(request_id, None)
        self._turned.set()
        if turn.step is not None:
            self._deliver(turn)

    # The following methods run in the thread.

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._run_calls()
                if self._engine is not None and not self._stopping:
                    self._take_one_turn(self._engine)
        except BaseException as error:  # wait_ended() raises it in the event loop, where the process can end
            self._in_loop(partial(self._ended.set_exception, error))
        else:
            self._in_loop(partial(self._ended.set_result, None))

    def _run_calls(self) -> None:
        if not self._can_step():
            self._run_next_call()
        while not self._calls.empty():
            self._run_next_call()

    def _run_next_call(self) -> None:
        call = self._calls.get()
        self._num_calls += 1  # before the call, because stats() reads it in the event loop
        call()

    def _can_step(self) -> bool:
        return self._engine is not None and self._engine.has_work and self._steps_ahead < MAX_STEPS_AHEAD

    def _take_one_turn(self, engine: Engine) -> None:
        step, events = None, list[StreamEvent]()
        if self._can_step():
            self.in_step = True
            events = engine.step()
            step = engine.last_step
            self.num_steps += 1  # before in_step, because stats() reads both to detect an idle thread
            self.in_step = False
            self._steps_ahead += 1
        added_ids, self._added_ids = self._added_ids, []
        turn = Turn(step, events, engine.claim_budget, engine.background_claim_budget, added_ids)
        self._in_loop(partial(self._take_turn, turn))

    def _in_loop(self, function: Callable[[], None]) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function)

    def _running_engine(self) -> Engine:
        assert self._engine is not None, "the engine has not been started"
        return self._engine

    def _add_request(self, request: GenerationRequest, stored: Sequence[StoredChoice], problem: str) -> None:
        self._running_engine().add_request(request, stored, problem)
        self._added_ids.append(request.request_id)

    def _abort_request(self, request_id: str, aborted: Callable[[str], None]) -> None:
        self._running_engine().abort_request(request_id)
        self._in_loop(partial(aborted, request_id))

    def _acknowledge(self) -> None:
        assert self._steps_ahead > 0, "more steps acknowledged than taken"
        self._steps_ahead -= 1

    def _drop_requests(self) -> None:
        engine = self._running_engine()
        for request_id in engine.request_ids:
            engine.abort_request(request_id)


def _complete(future: Future[_Result], function: Callable[[], _Result]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(function())
    except Exception as error:
        future.set_exception(error)
