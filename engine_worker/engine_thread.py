"""The engine in a thread of its own: steps follow each other while there is work, other calls run between two steps.

Whatever touches the engine or the device runs here, loading included, so neither needs a lock. The events of each step
go to the event loop as a Turn. It stores and publishes them while the next step computes, and then calls acknowledge().
Steps run ahead of it by MAX_STEPS_AHEAD at most: a store that is away stops the engine instead of filling memory.

A step may return the events of an earlier one: an engine that schedules ahead only keeps has_work true meanwhile. Knows
nothing of Redis or metrics.
"""

import asyncio
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from engine_worker.engine import Engine
from engine_worker.grammar_gate import Compile, GrammarGate
from engine_worker.scheduling.stats import EngineStats, StepStats
from shared.messages import GenerationRequest, StoredChoice, StreamEvent

MAX_STEPS_AHEAD = 2  # one on its way to the store, one waiting behind it: hides a round trip as long as a step

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class Turn:
    """What the engine did since the turn before: a step, or only calls (then `step` is None)."""

    step: StepStats | None
    events: Sequence[StreamEvent]
    num_open_seats: int
    num_open_batch_seats: int
    num_added: int  # requests that were added, ever: says which of them num_open_seats has seen


class EngineThread:
    def __init__(self) -> None:
        """To be made in the running event loop, where every method is called but those that say otherwise."""
        self.num_steps = 0  # readable from any thread
        self.in_step = False  # readable from any thread
        self._loop = asyncio.get_running_loop()
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._engine: Engine | None = None
        self._deliver: Callable[[Turn], None] = lambda turn: None
        self._gate = GrammarGate(lambda grammar: None, self._pass_on)  # until start() brings a real one
        self._num_requested = 0
        self._latest_turn = Turn(None, (), 0, 0, 0)
        self._turned = asyncio.Event()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        # The thread's own:
        self._steps_ahead = 0
        self._num_added = 0
        self._stopping = False
        # A daemon, so that a hung step cannot keep a process alive that is told to end.
        threading.Thread(target=self._run, name="engine", daemon=True).start()

    async def call(self, function: Callable[[], _Result]) -> _Result:
        """Run `function` between two steps; what it raises is raised here and does not end the thread."""
        future: Future[_Result] = Future()
        self._calls.put(partial(_complete, future, function))
        return await asyncio.wrap_future(future)

    def start(self, engine: Engine, deliver: Callable[[Turn], None], compile_grammar: Compile | None = None) -> None:
        """Step `engine` from now on; `deliver` gets each turn that had a step, in order, in the event loop.

        `compile_grammar` is called in another thread, for each request that has one.
        """
        self._deliver = deliver
        if compile_grammar is not None:
            self._gate = GrammarGate(compile_grammar, self._pass_on)
        self._calls.put(partial(setattr, self, "_engine", engine))

    def add_request(self, request: GenerationRequest, stored: Sequence[StoredChoice]) -> None:
        """Takes part in the next step, or when its grammar is compiled."""
        self._num_requested += 1
        self._gate.add(request, stored)

    def abort_request(self, request_id: str, aborted: Callable[[str], None]) -> None:
        """Takes no part in the next step, which finds its blocks free.

        `aborted` is called when every turn that may have events of it has been delivered.
        """
        if self._gate.drop(request_id):
            self._num_requested -= 1
            aborted(request_id)
        else:
            self._calls.put(partial(self._abort_request, request_id, aborted))

    def acknowledge(self) -> None:
        """The events of one more step are stored."""
        self._calls.put(self._acknowledge)

    async def drop_requests(self) -> None:
        """Abort all requests; when this returns, every turn before it has been delivered and no step has work."""
        self._num_requested -= self._gate.drop_all()
        await self.call(self._drop_requests)

    async def stats(self) -> EngineStats:
        return await self.call(lambda: self._running_engine().stats())

    async def kv_view(self) -> dict[str, Any]:
        return await self.call(lambda: self._running_engine().kv_view())

    async def kv_events(self, since: int) -> dict[str, Any]:
        return await self.call(lambda: self._running_engine().kv_events(since))

    async def wait_for_seats(self) -> int:
        """How many more requests could start in the next step, those just added counted; waits for at least one."""
        while (num_seats := self._num_open_seats()) <= 0:
            self._turned.clear()
            await self._turned.wait()
        return num_seats

    @property
    def num_batch_seats(self) -> int:
        """How many requests of the class `batch` could; not for more than there are seats at all."""
        return self._latest_turn.num_open_batch_seats - (self._num_requested - self._latest_turn.num_added)

    async def wait_ended(self) -> None:
        """Return after stop(); raise what a step raised."""
        await asyncio.shield(self._ended)

    async def stop(self) -> None:
        self._calls.put(partial(setattr, self, "_stopping", True))
        await self.wait_ended()

    def _pass_on(self, request: GenerationRequest, stored: Sequence[StoredChoice], problem: str) -> None:
        self._calls.put(partial(self._add_request, request, stored, problem))

    def _num_open_seats(self) -> int:
        return self._latest_turn.num_open_seats - (self._num_requested - self._latest_turn.num_added)

    def _take_turn(self, turn: Turn) -> None:
        self._latest_turn = turn
        self._turned.set()
        if turn.step is not None:
            self._deliver(turn)

    # From here on: the thread's own.

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
            self._calls.get()()
        while not self._calls.empty():
            self._calls.get()()

    def _can_step(self) -> bool:
        return self._engine is not None and self._engine.has_work and self._steps_ahead < MAX_STEPS_AHEAD

    def _take_one_turn(self, engine: Engine) -> None:
        step, events = None, list[StreamEvent]()
        if self._can_step():
            self.in_step = True
            events = engine.step()
            step = engine.last_step
            self.in_step = False
            self.num_steps += 1
            self._steps_ahead += 1
        turn = Turn(step, events, engine.num_open_seats, engine.num_open_batch_seats, self._num_added)
        self._in_loop(partial(self._take_turn, turn))

    def _in_loop(self, function: Callable[[], None]) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function)

    def _running_engine(self) -> Engine:
        assert self._engine is not None, "the engine has not been started"
        return self._engine

    def _add_request(self, request: GenerationRequest, stored: Sequence[StoredChoice], problem: str) -> None:
        self._running_engine().add_request(request, stored, problem)
        self._num_added += 1

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
