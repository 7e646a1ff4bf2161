"""Deadlines: an expired request is never computed, and its client gets an error that names the reason."""

import asyncio
from typing import Any

import pytest

from gateway.store.inbox import Inbox, StreamState
from shared.fleet_clock import FleetClock
from shared.messages import ErrorCode, ErrorEvent
from tests.builders import make_request
from tests.engine_worker.worker_harness import FOREVER_STEPS
from tests.integration.conftest import COMPLETIONS, World, nothing_is_left

BODY = {"prompt": "Hi", "max_tokens": 20, "temperature": 0, "ignore_eos": True}


def has_worker(stream: Inbox) -> bool:
    """Return whether this gateway knows that a worker has the request."""
    return stream.state in (StreamState.NEEDS_JOURNAL, StreamState.LIVE)


async def occupy(world: World) -> asyncio.Task[Any]:
    """Occupy the worker's only slot until the gate opens."""
    task = asyncio.create_task(world.gateways[0].post(COMPLETIONS, BODY))
    while not world.worker.gate.batches:
        await asyncio.sleep(0.005)
    return task


def computed(world: World) -> set[str]:
    return set().union(*world.worker.gate.batches)


@pytest.mark.parametrize("kept", [{}, {"detach_seconds": 60}], ids=["forgotten", "retained"])
async def test_queue_timeout_request_is_never_computed(one_slot: World, kept: dict[str, Any]) -> None:
    running = await occupy(one_slot)
    status, error = await one_slot.gateways[0].post(COMPLETIONS, {**BODY, **kept, "queue_timeout_seconds": 0.3})
    assert (status, error["error"]["code"]) == (503, "queue_timeout")
    one_slot.worker.gate.allow(FOREVER_STEPS)
    assert (await running)[0] == 200
    await nothing_is_left(one_slot)
    assert len(computed(one_slot)) == 1


async def test_queue_timeout_response_has_retry_after(one_slot: World) -> None:
    await occupy(one_slot)
    body = {**BODY, "queue_timeout_seconds": 0.1}
    async with one_slot.gateways[0].session.post(COMPLETIONS, json=body) as reply:
        assert (reply.status, reply.headers["Retry-After"], reply.headers["x-should-retry"]) == (503, "5", "true")


async def test_queue_timeout_does_not_end_started_request(world: World) -> None:
    begun = asyncio.create_task(world.gateways[0].post(COMPLETIONS, {**BODY, "queue_timeout_seconds": 3.0}))
    while not world.worker.gate.batches:
        await asyncio.sleep(0.005)
    while not any(has_worker(stream) for stream in world.gateways[0].client.streams):  # checked after the timeout
        await asyncio.sleep(0.01)
    world.worker.gate.allow(FOREVER_STEPS)
    assert (await begun)[0] == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_deadline_ends_running_request(world: World, stream: bool) -> None:
    world.worker.gate.allow(3)
    body = {**BODY, "timeout_seconds": 4.0, "detach_seconds": 60}
    if stream:
        async with world.gateways[0].streaming(COMPLETIONS, body) as reader:
            events = await reader.rest()
        assert len(events) == 5 and events[3].chunk["error"]["code"] == "deadline_exceeded"
        _, shown = await world.gateways[1].shown(reader.request_id)
        assert (shown["state"], shown["error"]["code"]) == ("failed", "deadline_exceeded")
    else:
        status, error = await world.gateways[0].post(COMPLETIONS, body)
        assert (status, error["error"]["code"]) == (504, "deadline_exceeded")
    world.worker.gate.allow(FOREVER_STEPS)
    await nothing_is_left(world)


async def test_worker_does_not_compute_expired_requests(world: World) -> None:
    """The worker checks the deadline with the fleet clock itself, because the gateway may be gone."""
    clock = FleetClock(world.worker.scripts.tick)
    await clock.tick()
    world.worker.gate.allow(FOREVER_STEPS)
    cases = {"deadline": ErrorCode.DEADLINE_EXCEEDED, "queue_deadline": ErrorCode.QUEUE_TIMEOUT}
    for name, code in cases.items():
        late = make_request([5, 6], request_id=name, max_tokens=3)
        late = type(late)(**{**{field: getattr(late, field) for field in late.__struct_fields__}, name: clock.now()})
        await world.worker.submit(late)
        end = await world.worker.end(name)
        assert isinstance(end, ErrorEvent) and end.code is code
    early = make_request([5, 6], max_tokens=3)
    await world.worker.submit(early)
    await world.worker.finish(early.request_id)
    assert computed(world) == {early.request_id}


async def test_timeout_defaults_and_limits_come_from_gateway(world: World, demo_model_dir: Any) -> None:
    options = {"default_queue_timeout_seconds": 2.0, "max_timeout_seconds": 60}
    async with world.another_gateway(demo_model_dir, **options) as gateway:
        for param in ("timeout_seconds", "queue_timeout_seconds"):
            for value in (61, 0, -1, "1"):
                status, error = await gateway.post(COMPLETIONS, {**BODY, param: value})
                assert (status, error["error"]["param"]) == (400, param)
        assert (await gateway.post(COMPLETIONS, {**BODY, "timeout_seconds": 3}))[0] == 504  # it started at once


async def test_queued_prompt_tokens_are_limited(one_slot: World, demo_model_dir: Any) -> None:
    running = await occupy(one_slot)
    async with one_slot.another_gateway(demo_model_dir, max_num_queued_tokens=100) as gateway:
        waiting = asyncio.create_task(gateway.post(COMPLETIONS, {**BODY, "prompt": [5] * 60}))
        while gateway.client.streams.num_waiting_tokens < 60:
            await asyncio.sleep(0.005)
        status, error = await gateway.post(COMPLETIONS, {**BODY, "prompt": [5] * 41})
        assert (status, error["error"]["code"]) == (503, "queue_full")
        one_slot.worker.gate.allow(FOREVER_STEPS)
        assert (await waiting)[0] == (await running)[0] == 200
