"""The worker's shell on a real store: requests become tokens, joins and cancels take a step, drains lose nothing."""

import asyncio

import pytest
from msgspec import structs

from engine_worker.engine_thread import MAX_STEPS_AHEAD
from engine_worker.worker import SHARE_SECONDS
from shared.messages import ErrorCode, ErrorEvent, FinishReason, JournalFrame, Usage, encode
from shared.redis_client import RedisConnections
from shared.redis_keys import RedisKeys
from shared.redis_scripts import Demand
from tests.builders import expected_output, make_request
from tests.engine_worker.worker_harness import FOREVER_STEPS, WorkerHarness, eventually
from tests.patience import PATIENCE_SECONDS


async def test_requests_become_tokens_and_leave_the_queue(connections: RedisConnections, keys: RedisKeys) -> None:
    requests = [make_request(prompt, f"{prompt}-tokens", max_tokens=9) for prompt in (1, 5, 40, 70)]
    async with WorkerHarness(connections, keys).serving() as harness:
        for request in requests:
            await harness.submit(request)
        for request in requests:
            tokens, end = await harness.finish(request.request_id)
            assert tokens == expected_output(request)
            assert end.usage == Usage(prompt_tokens=len(request.prompt_token_ids), completion_tokens=len(tokens))
        await eventually(lambda: harness.num_held == 0)
        assert await harness.num_unacknowledged() == 0


async def test_a_bad_request_ends_alone(connections: RedisConnections, keys: RedisKeys) -> None:
    bad, good = make_request([5, 10**6]), make_request(3)
    async with WorkerHarness(connections, keys).serving() as harness:
        await harness.submit(bad)
        await harness.submit(good)
        end = await harness.end(bad.request_id)
        assert isinstance(end, ErrorEvent) and "1000000" in end.message
        assert (await harness.finish(good.request_id))[0] == expected_output(good)


async def test_a_new_request_joins_the_running_batch_within_one_step(
    connections: RedisConnections, keys: RedisKeys
) -> None:
    first, second = make_request(3, max_tokens=50, ignore_eos=True), make_request(3)
    async with WorkerHarness(connections, keys, num_steps=2).serving() as harness:
        await harness.submit(first)
        await eventually(lambda: len(harness.gate.batches) == 3)  # the third step has begun and waits
        await harness.submit(second)
        await eventually(lambda: harness.num_held == 2)
        harness.gate.allow(2)
        await eventually(lambda: len(harness.gate.batches) == 5)
        assert harness.gate.batches[2] == {first.request_id}
        assert harness.gate.batches[3] == {first.request_id, second.request_id}


async def test_it_claims_what_fits_and_leaves_the_rest_to_others(
    connections: RedisConnections, keys: RedisKeys
) -> None:
    requests = [make_request(3, max_tokens=20, ignore_eos=True) for _ in range(5)]
    async with WorkerHarness(connections, keys, num_steps=0, max_num_seqs=2).serving() as harness:
        for request in requests:
            await harness.submit(request)
        harness.gate.allow(10)
        await eventually(lambda: len(harness.gate.batches) == 11)
        assert harness.num_held == 2
        assert await harness.num_claimed() == 2
        harness.gate.allow(FOREVER_STEPS)
        for request in requests:
            assert (await harness.finish(request.request_id))[0] == expected_output(request)
        assert max(len(batch) for batch in harness.gate.batches) == 2


async def test_what_has_not_begun_is_given_back_when_a_peer_with_room_finds_nothing(
    connections: RedisConnections, keys: RedisKeys
) -> None:
    """A step that never ends: what was claimed for the ones behind it waits here, until another worker is there."""
    running = make_request(4, max_tokens=50, ignore_eos=True)
    waiting = [make_request(3, f"waiting-{number}", max_tokens=5, ignore_eos=True) for number in range(6)]
    async with WorkerHarness(connections, keys, num_steps=2).serving() as harness:
        await harness.submit(running)
        await eventually(lambda: len(harness.gate.batches) == 3)
        for request in waiting:
            await harness.submit(request)
        await eventually(lambda: harness.num_held == 7)
        calls = harness.thread._calls
        # Six requests, and that the second step is stored, if the thread has not heard of it before the third began.
        await eventually(lambda: calls.qsize() >= 6 + harness.thread._steps_ahead)
        before = calls.qsize()
        joiner, demand = "joiner.1", Demand(8, room=8)
        await harness.scripts.register(joiner)
        assert (await harness.scripts.take(joiner, demand)).entries == []
        await eventually(lambda: calls.qsize() > before)  # the worker has seen it
        harness.gate.allow(1)
        await eventually(lambda: harness.num_held == 4)
        taken: list[str] = []
        while len(taken) < 3:
            taken += [entry.request_id for entry in (await harness.scripts.take(joiner, demand)).entries]
        assert taken == ["waiting-3", "waiting-4", "waiting-5"]
        harness.gate.allow(FOREVER_STEPS)
        for request in (running, *waiting[:3]):
            assert (await harness.finish(request.request_id))[0] == expected_output(request)


async def test_only_a_worker_that_holds_something_looks_at_what_its_peers_hold(
    connections: RedisConnections, keys: RedisKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[float] = []

    async def next_tick(seconds: float) -> None:
        looks.append(seconds)
        await asyncio.Event().wait()

    monkeypatch.setattr("engine_worker.worker.next_tick", next_tick)
    async with WorkerHarness(connections, keys, num_steps=0).serving() as harness:
        await eventually(lambda: harness.incarnations)
        while not (await connections.commands.info("clients"))["blocked_clients"]:
            await asyncio.sleep(0)
        assert looks == []
        await harness.submit(make_request(3))
        await eventually(lambda: looks == [SHARE_SECONDS])


async def test_what_waits_here_for_longer_than_its_time_in_the_queue_is_timed_out(
    connections: RedisConnections, keys: RedisKeys
) -> None:
    """A step that never ends: what was claimed for those behind it gets no turn, as it gets no KV blocks."""
    running, patient = make_request(4, max_tokens=30, ignore_eos=True), make_request(3, "patient", max_tokens=5)
    async with WorkerHarness(connections, keys, num_steps=2).serving() as harness:
        await harness.submit(running)
        await eventually(lambda: len(harness.gate.batches) == 3)
        overdue = structs.replace(make_request(3, "overdue"), queue_deadline=harness.fleet_clock.now() + 0.2)
        for request in (patient, overdue):
            await harness.submit(request)
        await eventually(lambda: harness.num_held == 3)
        # Two requests, that one of them, whose time is over, is to be withdrawn, and that the second step is stored,
        # if the thread has not heard of it before the third began.
        await eventually(lambda: harness.thread._calls.qsize() >= 3 + harness.thread._steps_ahead)
        harness.gate.allow(FOREVER_STEPS)
        end = await harness.end("overdue")
        assert isinstance(end, ErrorEvent) and end.code is ErrorCode.QUEUE_TIMEOUT
        for request in (running, patient):
            assert (await harness.finish(request.request_id))[0] == expected_output(request)
        assert not any("overdue" in batch for batch in harness.gate.batches)
        assert await harness.num_unacknowledged() == 0


async def test_a_request_that_is_accepted_anew_gets_no_token_of_the_attempt_before(
    connections: RedisConnections, keys: RedisKeys
) -> None:
    """Ended and accepted again while a step with it is running: its old tokens come after its new entry was read."""
    request = make_request(5, max_tokens=30, ignore_eos=True)
    expected = expected_output(request)
    async with WorkerHarness(connections, keys, num_steps=6).serving() as harness:
        await harness.submit(request)
        await eventually(lambda: len(harness.gate.batches) == 7)  # the seventh step has begun and waits
        await harness.scripts.cancel(request.request_id, "interactive")
        await harness.submit(request, journal=encode(JournalFrame(0, expected[:2])))
        harness.gate.allow(FOREVER_STEPS)
        tokens, end = await harness.finish(request.request_id)
        assert (tokens, end.reason) == (expected, FinishReason.LENGTH)
        await eventually(lambda: harness.num_held == 0)
        assert await harness.num_unacknowledged() == 0


@pytest.mark.parametrize("hint", ["hint arrives", "hint is lost"])
async def test_a_cancelled_request_frees_its_blocks(connections: RedisConnections, keys: RedisKeys, hint: str) -> None:
    cancelled = make_request(9, max_tokens=200, ignore_eos=True)
    other = make_request(3, max_tokens=200, ignore_eos=True)
    async with WorkerHarness(connections, keys, num_steps=4).serving() as harness:
        for request in (cancelled, other):
            await harness.submit(request)
        await eventually(lambda: harness.num_held == 2)
        await eventually(lambda: len(harness.gate.batches) == 5)
        if hint == "hint arrives":
            assert await harness.scripts.cancel(cancelled.request_id, "interactive")
        else:
            await harness.scripts.redis.unlink(keys.request(cancelled.request_id), keys.journal(cancelled.request_id))
        num_steps = len(harness.gate.batches)
        harness.gate.allow(FOREVER_STEPS)
        await harness.finish(other.request_id)
        late = [batch for batch in harness.gate.batches[num_steps:] if cancelled.request_id in batch]
        # A lost hint is found by the next EMIT: the steps ahead of it may still compute the request.
        assert len(late) <= MAX_STEPS_AHEAD + 1
        stats = await harness.thread.stats()
        assert stats.kv_cache.num_active_blocks == 0
        assert stats.counters.finished["cancelled"] == 1
        assert await harness.num_unacknowledged() == 0


async def test_a_hint_frees_the_blocks_before_the_next_step(connections: RedisConnections, keys: RedisKeys) -> None:
    request = make_request(9, max_tokens=200, ignore_eos=True)
    async with WorkerHarness(connections, keys, num_steps=3).serving() as harness:
        await harness.submit(request)
        await eventually(lambda: len(harness.gate.batches) == 4)  # three steps are done, the fourth waits
        await harness.scripts.cancel(request.request_id, "interactive")
        await eventually(lambda: harness.hinted)
        harness.gate.allow(1)
        await eventually(lambda: harness.num_held == 0)
        assert len(harness.gate.batches) == 4
        assert (await harness.thread.stats()).kv_cache.num_active_blocks == 0


async def test_a_resumed_request_continues_after_its_journal(connections: RedisConnections, keys: RedisKeys) -> None:
    request = make_request(6, max_tokens=12, ignore_eos=True)
    whole = expected_output(request)
    journal = encode(JournalFrame(0, whole[:3])) + encode(JournalFrame(3, whole[3:5]))
    async with WorkerHarness(connections, keys).serving() as harness:
        await harness.submit(request, journal)
        tokens, end = await harness.finish(request.request_id)
    assert tokens == whole
    assert end.usage.completion_tokens == 12


async def test_a_request_whose_journal_is_complete_only_ends(connections: RedisConnections, keys: RedisKeys) -> None:
    request = make_request(6, max_tokens=4, ignore_eos=True)
    whole = expected_output(request)
    async with WorkerHarness(connections, keys).serving() as harness:
        await harness.submit(request, encode(JournalFrame(0, whole)))
        tokens, end = await harness.finish(request.request_id)
    assert (tokens, end.reason) == (whole, FinishReason.LENGTH)
    assert not any(harness.gate.batches)


async def test_a_fenced_worker_drops_everything_and_returns_under_a_new_id(
    connections: RedisConnections, keys: RedisKeys
) -> None:
    requests = [make_request(prompt, max_tokens=30, ignore_eos=True) for prompt in (4, 30)]
    async with WorkerHarness(connections, keys, num_steps=6).serving() as harness:
        for request in requests:
            await harness.submit(request)
        await eventually(lambda: len(harness.gate.batches) == 7)
        await harness.scripts.redis.delete(keys.fence(harness.incarnations[0]))
        harness.gate.allow(FOREVER_STEPS)
        for request in requests:
            assert (await harness.finish(request.request_id))[0] == expected_output(request)
        assert len(harness.incarnations) == 2
        assert harness.incarnations[0] != harness.incarnations[1]
        assert await harness.num_unacknowledged() == 0
        assert (await harness.thread.stats()).kv_cache.num_active_blocks == 0


async def test_a_drain_finishes_what_runs_and_claims_nothing_more(
    connections: RedisConnections, keys: RedisKeys
) -> None:
    running, late = make_request(4, max_tokens=20, ignore_eos=True), make_request(4)
    async with WorkerHarness(connections, keys, num_steps=2, max_num_seqs=1).serving() as harness:
        await harness.submit(running)
        await eventually(lambda: len(harness.gate.batches) == 3)
        await harness.submit(late)
        harness.worker.drain()
        harness.gate.allow(FOREVER_STEPS)
        assert harness.running is not None
        await asyncio.wait_for(harness.running, PATIENCE_SECONDS)
        assert (await harness.finish(running.request_id))[0] == expected_output(running)
        assert await harness.tokens(late.request_id) == []
        assert await harness.num_claimed() == 0


async def test_what_a_drain_cannot_finish_goes_back_and_counts_no_attempt(
    connections: RedisConnections, keys: RedisKeys
) -> None:
    request = make_request(4, max_tokens=60, ignore_eos=True)
    async with WorkerHarness(connections, keys, num_steps=5, drain_seconds=0.0).serving() as harness:
        await harness.submit(request)
        await eventually(lambda: len(harness.gate.batches) == 6)
        harness.worker.drain()
        assert harness.running is not None
        while not harness.running.done():  # step by step, so that it has not finished before it is dropped
            harness.gate.allow(1)
            await asyncio.wait([harness.running], timeout=0.05)
        await harness.running
        tokens = await harness.tokens(request.request_id)
        assert 6 <= len(tokens) == harness.thread.num_steps < 60  # what was computed is in the journal
        assert tokens == expected_output(request)[: len(tokens)]
        assert await harness.scripts.redis.hget(keys.request(request.request_id), "attempt") == b"1"
        assert await harness.num_unacknowledged() == 1 and await harness.num_claimed() == 0
    async with WorkerHarness(connections, keys).serving() as successor:
        assert (await successor.finish(request.request_id))[0] == expected_output(request)


async def test_an_exception_in_a_step_ends_the_worker(connections: RedisConnections, keys: RedisKeys) -> None:
    async with WorkerHarness(connections, keys).serving() as harness:
        harness.gate.failure = RuntimeError("illegal memory access")
        await harness.submit(make_request(4))
        assert harness.running is not None
        with pytest.raises(RuntimeError, match="illegal memory access"):
            await asyncio.wait_for(harness.running, PATIENCE_SECONDS)
