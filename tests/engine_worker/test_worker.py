"""The Worker on a real store: requests become tokens, new requests and cancels take one step, drains lose nothing."""

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


async def test_worker_requests_become_tokens_and_leave_queue(connections: RedisConnections, keys: RedisKeys) -> None:
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


async def test_worker_bad_request_does_not_affect_others(connections: RedisConnections, keys: RedisKeys) -> None:
    bad, good = make_request([5, 10**6]), make_request(3)
    async with WorkerHarness(connections, keys).serving() as harness:
        await harness.submit(bad)
        await harness.submit(good)
        end = await harness.end(bad.request_id)
        assert isinstance(end, ErrorEvent) and "1000000" in end.message
        assert (await harness.finish(good.request_id))[0] == expected_output(good)


async def test_worker_new_request_joins_batch_within_one_step(connections: RedisConnections, keys: RedisKeys) -> None:
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


async def test_worker_claims_only_what_fits(connections: RedisConnections, keys: RedisKeys) -> None:
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


async def test_worker_gives_unstarted_requests_to_idle_peer(connections: RedisConnections, keys: RedisKeys) -> None:
    """While a step blocks, requests claimed after it wait here until another worker has room."""
    running = make_request(4, max_tokens=50, ignore_eos=True)
    waiting = [make_request(3, f"waiting-{number}", max_tokens=5, ignore_eos=True) for number in range(6)]
    async with WorkerHarness(connections, keys, num_steps=2).serving() as harness:
        await harness.submit(running)
        await eventually(lambda: len(harness.gate.batches) == 3)
        for request in waiting:
            await harness.submit(request)
        await eventually(lambda: harness.num_held == 7)
        calls = harness.thread._calls
        # Six requests, plus the acknowledgment of the second step if the third began before it.
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


async def test_worker_checks_peers_only_while_it_holds_requests(
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


async def test_worker_request_waiting_past_queue_deadline_times_out(
    connections: RedisConnections, keys: RedisKeys
) -> None:
    """While a step blocks, requests claimed after it are not scheduled, as without free KV blocks."""
    running, patient = make_request(4, max_tokens=30, ignore_eos=True), make_request(3, "patient", max_tokens=5)
    async with WorkerHarness(connections, keys, num_steps=2).serving() as harness:
        await harness.submit(running)
        await eventually(lambda: len(harness.gate.batches) == 3)
        # Long enough to be claimed on a busy machine; a request that is claimed later does not reach the engine.
        overdue = structs.replace(make_request(3, "overdue"), queue_deadline=harness.fleet_clock.now() + 2.0)
        for request in (patient, overdue):
            await harness.submit(request)
        await eventually(lambda: harness.num_held == 3)
        # Two requests, the withdrawal of the overdue one, plus the acknowledgment of the second step if the third
        # began before it.
        await eventually(lambda: harness.thread._calls.qsize() >= 3 + harness.thread._steps_ahead)
        harness.gate.allow(FOREVER_STEPS)
        end = await harness.end("overdue")
        assert isinstance(end, ErrorEvent) and end.code is ErrorCode.QUEUE_TIMEOUT
        for request in (running, patient):
            assert (await harness.finish(request.request_id))[0] == expected_output(request)
        assert not any("overdue" in batch for batch in harness.gate.batches)
        assert await harness.num_unacknowledged() == 0


async def test_worker_accepted_again_gets_no_old_tokens(connections: RedisConnections, keys: RedisKeys) -> None:
    """The request ends and is accepted again while a step computes it: old tokens arrive after its new entry."""
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
async def test_worker_cancelled_request_frees_its_blocks(
    connections: RedisConnections, keys: RedisKeys, hint: str
) -> None:
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
        # The next EMIT detects a lost hint; the steps ahead of it may still compute the request.
        assert len(late) <= MAX_STEPS_AHEAD + 1
        stats = await harness.thread.stats()
        assert stats.kv_cache.num_active_blocks == 0
        assert stats.counters.finished["cancelled"] == 1
        assert await harness.num_unacknowledged() == 0


async def test_worker_cancel_hint_frees_blocks_before_next_step(connections: RedisConnections, keys: RedisKeys) -> None:
    request = make_request(9, max_tokens=200, ignore_eos=True)
    async with WorkerHarness(connections, keys, num_steps=3).serving() as harness:
        await harness.submit(request)
        await eventually(lambda: len(harness.gate.batches) == 4)  # three steps are done, the fourth waits
        await harness.until_hints_arrive()
        await harness.scripts.cancel(request.request_id, "interactive")
        await eventually(lambda: harness.hinted)
        harness.gate.allow(1)
        await eventually(lambda: harness.num_held == 0)
        assert len(harness.gate.batches) == 4
        assert (await harness.thread.stats()).kv_cache.num_active_blocks == 0


async def test_worker_resumed_request_continues_after_journal(connections: RedisConnections, keys: RedisKeys) -> None:
    request = make_request(6, max_tokens=12, ignore_eos=True)
    whole = expected_output(request)
    journal = encode(JournalFrame(0, whole[:3])) + encode(JournalFrame(3, whole[3:5]))
    async with WorkerHarness(connections, keys).serving() as harness:
        await harness.submit(request, journal)
        tokens, end = await harness.finish(request.request_id)
    assert tokens == whole
    assert end.usage.completion_tokens == 12


async def test_worker_complete_journal_only_ends(connections: RedisConnections, keys: RedisKeys) -> None:
    request = make_request(6, max_tokens=4, ignore_eos=True)
    whole = expected_output(request)
    async with WorkerHarness(connections, keys).serving() as harness:
        await harness.submit(request, encode(JournalFrame(0, whole)))
        tokens, end = await harness.finish(request.request_id)
    assert (tokens, end.reason) == (whole, FinishReason.LENGTH)
    assert not any(harness.gate.batches)


async def test_worker_fenced_drops_all_and_gets_new_id(connections: RedisConnections, keys: RedisKeys) -> None:
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


async def test_worker_drain_finishes_running_and_claims_nothing(connections: RedisConnections, keys: RedisKeys) -> None:
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


async def test_worker_drain_timeout_requeues_without_attempt(connections: RedisConnections, keys: RedisKeys) -> None:
    request = make_request(4, max_tokens=60, ignore_eos=True)
    async with WorkerHarness(connections, keys, num_steps=5, drain_seconds=0.0).serving() as harness:
        await harness.submit(request)
        await eventually(lambda: len(harness.gate.batches) == 6)
        harness.worker.drain()
        assert harness.running is not None
        while not harness.running.done():  # step by step, so that the request cannot finish before the drop
            harness.gate.allow(1)
            await asyncio.wait([harness.running], timeout=0.05)
        await harness.running
        tokens = await harness.tokens(request.request_id)
        assert 6 <= len(tokens) == harness.thread.num_steps < 60  # computed tokens are in the journal
        assert tokens == expected_output(request)[: len(tokens)]
        assert await harness.scripts.redis.hget(keys.request(request.request_id), "attempt") == b"1"
        assert await harness.num_unacknowledged() == 1 and await harness.num_claimed() == 0
    async with WorkerHarness(connections, keys).serving() as successor:
        assert (await successor.finish(request.request_id))[0] == expected_output(request)


async def test_worker_step_exception_ends_worker(connections: RedisConnections, keys: RedisKeys) -> None:
    async with WorkerHarness(connections, keys).serving() as harness:
        harness.gate.failure = RuntimeError("illegal memory access")
        await harness.submit(make_request(4))
        assert harness.running is not None
        with pytest.raises(RuntimeError, match="illegal memory access"):
            await asyncio.wait_for(harness.running, PATIENCE_SECONDS)
