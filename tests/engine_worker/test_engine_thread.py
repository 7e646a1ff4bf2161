"""The engine thread: a bounded number of steps ahead, calls between steps, and an exact count of free slots."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from engine_worker.engine import Engine
from engine_worker.engine_thread import MAX_STEPS_AHEAD, EngineThread, Turn
from engine_worker.scheduling.stats import EngineStats
from tests.builders import FakeModelRunner, make_engine, make_request
from tests.engine_worker.worker_harness import FOREVER_STEPS, Gate, eventually
from tests.patience import PATIENCE_SECONDS


@pytest.fixture
async def gate() -> Gate:
    return Gate(FOREVER_STEPS)


@pytest.fixture
async def thread(gate: Gate) -> AsyncIterator[EngineThread]:
    thread = EngineThread()
    yield thread
    gate.allow(FOREVER_STEPS)
    with contextlib.suppress(RuntimeError):
        await thread.stop()


async def test_thread_runs_at_most_two_unacknowledged_steps(thread: EngineThread, gate: Gate) -> None:
    turns: list[Turn] = []
    thread.start(make_engine(FakeModelRunner(before_step=gate)), turns.append)
    thread.add_request(make_request(3, max_tokens=50, ignore_eos=True), ())
    await eventually(lambda: len(turns) == MAX_STEPS_AHEAD)
    await thread.stats()  # calls are answered while no further step may run
    await thread.stats()
    assert thread.num_steps == MAX_STEPS_AHEAD == 2
    thread.acknowledge()
    await eventually(lambda: len(turns) == 3)
    await thread.stats()
    assert thread.num_steps == 3


async def test_thread_demand_counts_requests_added_since_last_turn(thread: EngineThread, gate: Gate) -> None:
    thread.start(make_engine(FakeModelRunner(before_step=gate), max_num_seqs=4), lambda turn: thread.acknowledge())
    assert (await thread.wait_for_demand()).requests == 4
    for _ in range(3):
        thread.add_request(make_request(3, max_tokens=100, ignore_eos=True), ())
    assert (await thread.wait_for_demand()).requests == 1  # before the engine has taken any of them
    thread.add_request(make_request(3, max_tokens=100, ignore_eos=True), ())
    waiting = asyncio.create_task(thread.wait_for_demand())
    await thread.stats()
    assert not waiting.done()
    await thread.drop_requests()
    assert (await asyncio.wait_for(waiting, PATIENCE_SECONDS)).requests == 4


async def test_thread_dropped_requests_give_no_more_events(thread: EngineThread, gate: Gate) -> None:
    turns: list[Turn] = []

    def deliver(turn: Turn) -> None:
        turns.append(turn)
        thread.acknowledge()

    thread.start(make_engine(FakeModelRunner(before_step=gate)), deliver)
    thread.add_request(make_request(3, max_tokens=200, ignore_eos=True), ())
    await eventually(lambda: len(turns) >= 3)
    await thread.drop_requests()
    num_turns = len(turns)
    stats = await thread.stats()
    assert (len(turns), stats.num_running, stats.kv_cache.num_active_blocks) == (num_turns, 0, 0)


async def test_thread_stats_idle_engine_are_cached(
    thread: EngineThread, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, asked = make_engine(FakeModelRunner(before_step=gate)), list[EngineStats]()

    def stats() -> EngineStats:
        asked.append(Engine.stats(engine))
        return asked[-1]

    monkeypatch.setattr(engine, "stats", stats)
    thread.start(engine, lambda turn: thread.acknowledge())
    for _ in range(3):
        assert (await thread.stats()).num_running == 0
    assert len(asked) == 1
    thread.add_request(make_request(3, max_tokens=4, ignore_eos=True), ())
    await eventually(lambda: thread.num_steps == 4)
    await thread.call(lambda: None)  # returns after the thread has finished its work for the steps
    after = [await thread.stats() for _ in range(3)]
    assert [figures.counters for figures in after] == [Engine.stats(engine).counters] * 3
    assert len(asked) == 2 and asked[0].counters != asked[1].counters


async def test_thread_call_exception_reaches_only_its_caller(thread: EngineThread, gate: Gate) -> None:
    def fail() -> None:
        raise ValueError("no such file")

    with pytest.raises(ValueError, match="no such file"):
        await thread.call(fail)
    assert await thread.call(lambda: 7) == 7


async def test_thread_step_exception_ends_thread(thread: EngineThread, gate: Gate) -> None:
    gate.failure = RuntimeError("device lost")
    thread.start(make_engine(FakeModelRunner(before_step=gate)), lambda turn: None)
    thread.add_request(make_request(3), ())
    with pytest.raises(RuntimeError, match="device lost"):
        await asyncio.wait_for(thread.wait_ended(), PATIENCE_SECONDS)
