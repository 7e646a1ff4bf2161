"""A worker process on a fake model hangs, fails or is stopped. No token is lost in any case."""

import asyncio
import signal
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gateway.store.inference_client import InferenceClient
from shared.messages import FinishEvent, TokenEvent
from shared.reaping import reap_workers_with_prefix
from shared.redis_client import RedisConnections
from shared.redis_keys import RedisKeys
from tests.builders import expected_beams, expected_output, make_request
from tests.conftest import Valkey
from tests.e2e.fleet import STOP_SECONDS, Fleet, running_fleet
from tests.e2e.reader import Reader
from tests.inbox_reader import InboxReader

SCRIPT = str(Path(__file__).with_name("scripted_worker.py"))
Start = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    with running_fleet(tmp_path / "logs") as fleet:
        yield fleet


@pytest.fixture
def start(fleet: Fleet, valkey: Valkey, keys: RedisKeys) -> Start:
    """Return a function that starts a scripted worker of the test's model."""

    def start(name: str, *flags: str) -> "subprocess.Popen[bytes]":
        argv = ["--model", "/none", "--served-model-name", keys.model_name, "--redis-url", valkey.url]
        argv += ["--metrics-port", "0", "--worker-id", name, *flags]
        return fleet.start(name, SCRIPT, *argv, PYTHONPATH=".")

    return start


@pytest.fixture
async def client(connections: RedisConnections, keys: RedisKeys) -> AsyncIterator[InferenceClient]:
    client = InferenceClient(connections, keys, "g0")
    await client.start()
    yield client
    await client.close()


async def exit_status(process: "subprocess.Popen[bytes]") -> int:
    return await asyncio.to_thread(process.wait, STOP_SECONDS)


async def test_hung_step_ends_the_process_and_dumps_stacks(
    start: Start, client: InferenceClient, connections: RedisConnections, keys: RedisKeys, fleet: Fleet
) -> None:
    hung = start("w0", "--script-hang-at-step", "5", "--step-timeout-seconds", "2")
    reader = Reader(client, max_tokens=30)
    assert await exit_status(hung) == 86
    assert "before_step" in fleet.log("w0")  # where it hangs
    await reap_workers_with_prefix(connections.commands, keys, "w0")  # as the supervisor does
    start("w1")
    await reader.check_complete()


async def test_requests_of_a_hung_worker_continue_at_once_elsewhere(
    start: Start, client: InferenceClient, connections: RedisConnections, keys: RedisKeys, fleet: Fleet
) -> None:
    """Nothing reaps the worker, and the other one would miss its heartbeats only after ten minutes."""
    hung = start("w0", "--script-hang-at-step", "5", "--step-timeout-seconds", "2")
    reader = Reader(client, max_tokens=30)
    assert await exit_status(hung) == 86
    start("w1", "--dead-after", "600")
    await reader.check_complete()
    log = fleet.log("w0")
    assert log.index("before_step") < log.index("failed; requeued its requests: ReapSummary(")
    assert await connections.commands.hget(keys.request(reader.request.request_id), "attempt") == b"2"


async def test_exception_in_a_step_ends_the_process_with_its_stack(
    start: Start, client: InferenceClient, connections: RedisConnections, keys: RedisKeys, fleet: Fleet
) -> None:
    failed = start("w0", "--script-raise-at-step", "9")
    reader = Reader(client, max_tokens=30)
    assert await exit_status(failed) == 1
    assert "scripted failure of the device" in fleet.log("w0") and "Traceback" in fleet.log("w0")
    await reap_workers_with_prefix(connections.commands, keys, "w0")
    start("w1")
    await reader.check_complete()


async def test_requests_of_a_failed_worker_continue_at_once_elsewhere(
    start: Start, client: InferenceClient, connections: RedisConnections, keys: RedisKeys, fleet: Fleet
) -> None:
    """Nothing reaps the worker, and the other one would miss its heartbeats only after ten minutes."""
    failed = start("w0", "--script-raise-at-step", "9")
    reader = Reader(client, max_tokens=30)
    assert await exit_status(failed) == 1
    start("w1", "--dead-after", "600")
    await reader.check_complete()
    assert "failed; requeued its requests: ReapSummary(requeued=1" in fleet.log("w0")
    # It counts as a crash; otherwise a request that fails every worker would never be given up.
    assert await connections.commands.hget(keys.request(reader.request.request_id), "attempt") == b"2"


async def test_requests_of_a_killed_rank_0_continue_at_once_elsewhere(
    start: Start, client: InferenceClient, connections: RedisConnections, keys: RedisKeys
) -> None:
    """It has no supervisor, and the other worker would miss its heartbeats only after ten minutes."""
    killed = start("w0", "--script-step-seconds", "0.02", "--tensor-parallel-size", "2")
    reader = Reader(client, max_tokens=200)
    await reader.has(5)
    start("w1", "--dead-after", "600")
    killed.kill()
    await reader.check_complete()
    assert await connections.commands.hget(keys.request(reader.request.request_id), "attempt") == b"2"


async def test_sigterm_lets_running_requests_end(start: Start, client: InferenceClient) -> None:
    worker = start("w0", "--script-step-seconds", "0.01")
    reader = Reader(client, max_tokens=60)
    await reader.has(5)
    worker.terminate()
    assert await exit_status(worker) == 0
    await reader.check_complete()


async def test_unfinished_requests_of_a_drain_continue_at_once(
    start: Start, client: InferenceClient, connections: RedisConnections, keys: RedisKeys
) -> None:
    leaving = start("w0", "--script-step-seconds", "0.02", "--drain-seconds", "0.1")
    reader = Reader(client, max_tokens=400)
    await reader.has(5)
    start("w1")
    leaving.terminate()
    assert await exit_status(leaving) == 0
    num_tokens = len(reader.tokens)
    assert num_tokens < 400
    await reader.check_complete()
    # Handed back, not reaped: reaping counts an attempt, so rolling restarts would make dead letters.
    assert await connections.commands.hget(keys.request(reader.request.request_id), "attempt") == b"1"


async def test_second_sigterm_ends_the_process_at_once(start: Start, client: InferenceClient, fleet: Fleet) -> None:
    worker = start("w0", "--script-step-seconds", "0.02")
    reader = Reader(client, max_tokens=1900)
    await reader.has(5)
    worker.terminate()
    async with asyncio.timeout(STOP_SECONDS):
        while "draining" not in fleet.log("w0"):
            await asyncio.sleep(0.01)
    worker.terminate()
    assert await exit_status(worker) == 128 + signal.SIGTERM
    reader.finished.cancel()


@pytest.mark.parametrize(
    "sampling",
    [{"n": 2, "temperature": 1.0, "seed": 3}, {"n": 2, "use_beam_search": True, "beam_width": 3}],
    ids=["samples", "beams"],
)
async def test_sequence_groups_survive_the_kill_of_their_worker(
    start: Start,
    client: InferenceClient,
    connections: RedisConnections,
    keys: RedisKeys,
    fleet: Fleet,
    sampling: dict[str, Any],
) -> None:
    """Sampled choices continue where each was; a beam search starts again. Every choice is complete, once."""
    first = start("w0", "--script-step-seconds", "0.01")
    request = make_request(20, ignore_eos=True, max_tokens=60, **sampling)
    stream = await client.submission.submit(request)
    async with asyncio.timeout(STOP_SECONDS):
        # A search writes only progress frames: three journal bytes per step.
        while await connections.commands.strlen(keys.journal(request.request_id)) < 100:
            await asyncio.sleep(0.005)
    first.kill()
    await exit_status(first)
    await reap_workers_with_prefix(connections.commands, keys, "w0")
    start("w1")
    tokens: list[list[int]] = [[], []]
    async with asyncio.timeout(STOP_SECONDS):
        events = [event async for event in InboxReader(stream)]
    for event in events[:-1]:
        assert isinstance(event, TokenEvent) and event.index == len(tokens[event.choice])
        tokens[event.choice] += event.token_ids
    if request.sampling.use_beam_search:
        assert tokens == [output for output, _ in expected_beams(request, max_num_tokens=2048)]
    else:
        assert tokens == [expected_output(request, max_num_tokens=2048, choice=choice) for choice in range(2)]
    assert isinstance(events[-1], FinishEvent) and events[-1].usage.completion_tokens == 120
