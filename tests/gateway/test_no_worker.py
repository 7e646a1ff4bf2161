"""While no worker is ready, but one was: requests are taken and wait for the next one, within bounds."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shared.messages import WorkerPhase
from tests.gateway.batches.batch_clients import begun, client_of, jsonl, line
from tests.gateway.conftest import Gateway
from tests.gateway.fake_inference import FakeInferenceClient, heartbeat, says
from tests.patience import PATIENCE_SECONDS

BODY = {"prompt": "a"}


async def ask(gateway: Gateway, path: str, body: dict[str, Any] | None = None) -> tuple[int, Any]:
    method = "GET" if body is None else "POST"
    async with gateway.session.request(method, path, json=body) as response:
        return response.status, await response.json()


@pytest.fixture
def start(start_gateway: Callable[..., Any]) -> Callable[..., Any]:
    """A gateway whose only worker was ready and is gone."""

    async def start(**changes: Any) -> Gateway:
        gateway = await start_gateway(FakeInferenceClient(says([5])), **changes)
        assert (await ask(gateway, "/ready"))[0] == 200
        gateway.engine.workers = [heartbeat(phase=WorkerPhase.LOAD)]
        return gateway

    return start


async def test_requests_are_taken_and_the_gateway_stays_in_its_service(start: Callable[..., Any]) -> None:
    gateway = await start()
    assert (await ask(gateway, "/v1/completions", BODY))[0] == 200
    for path in ("/readyz", "/readyz?all=true"):  # of a gateway that is not ready a balancer sends requests to nobody
        status, body = await ask(gateway, path)
        assert (status, body["state"], body["ready_workers"], body["ready_models"]) == (200, "waiting", 0, 1)
    status, body = await ask(gateway, "/ready")
    assert (status, body["state"], body["phase"]) == (503, "waiting", "load")
    async with gateway.session.get("/health") as response:
        assert response.status == 503


@pytest.mark.parametrize(
    ("options", "asked", "queue_deadline"),
    [
        ({}, {}, 120.0),
        ({"no_worker_wait_seconds": 7.0}, {}, 7.0),
        ({}, {"queue_timeout_seconds": 300}, 300.0),
        ({}, {"timeout_seconds": 5}, 120.0),
        ({"default_queue_timeout_seconds": 20.0}, {}, 20.0),
    ],
)
async def test_each_waits_for_its_own_time_or_for_that_of_a_restart(
    start: Callable[..., Any], options: dict[str, Any], asked: dict[str, Any], queue_deadline: float
) -> None:
    gateway = await start(**options)
    assert (await ask(gateway, "/v1/completions", {**BODY, **asked}))[0] == 200
    assert gateway.engine.requests[-1].queue_deadline == queue_deadline  # the fake fleet's clock stands at 0


async def test_with_a_ready_worker_nothing_is_bounded(start: Callable[..., Any]) -> None:
    gateway = await start()
    gateway.engine.workers = [heartbeat()]
    assert (await ask(gateway, "/v1/completions", BODY))[0] == 200
    assert gateway.engine.requests[-1].queue_deadline is None


async def test_a_worker_that_does_not_come_back_is_not_waited_for(start: Callable[..., Any]) -> None:
    gateway = await start(no_worker_wait_seconds=30.0)
    gateway.engine.seconds_without_worker = 29.9
    assert (await ask(gateway, "/v1/completions", BODY))[0] == 200
    gateway.engine.seconds_without_worker = 30.0
    status, body = await ask(gateway, "/v1/completions", BODY)
    assert (status, body["error"]["code"]) == (503, "no_worker")
    assert gateway.metric("pagestream_requests_rejected_total", reason="no_worker") == 1
    assert [(await ask(gateway, path))[1]["state"] for path in ("/ready", "/readyz")] == ["no_worker"] * 2
    assert (await ask(gateway, "/readyz"))[0] == 503


async def test_who_will_not_wait_is_refused_at_once(start: Callable[..., Any]) -> None:
    gateway = await start(no_worker="refuse")
    status, body = await ask(gateway, "/v1/completions", BODY)
    assert (status, body["error"]["code"]) == (503, "no_worker")
    assert (await ask(gateway, "/readyz"))[0] == 503


async def test_the_next_worker_is_taken_to_be_like_the_last(start_gateway: Callable[..., Any]) -> None:
    gateway = await start_gateway(FakeInferenceClient(says([5])))
    gateway.engine.workers = [heartbeat(max_model_len=64)]
    assert (await ask(gateway, "/ready"))[0] == 200
    gateway.engine.workers = []
    status, body = await ask(gateway, "/v1/completions", {"prompt": "a" * 64})
    assert (status, body["error"]["code"]) == (400, "context_length_exceeded")
    assert "64 tokens" in body["error"]["message"]


async def test_beams_above_half_of_the_smallest_worker_are_refused(start_gateway: Callable[..., Any]) -> None:
    gateway = await start_gateway(FakeInferenceClient(says([5])))
    gateway.engine.workers = [heartbeat(max_num_seqs=64), heartbeat(max_num_seqs=16), heartbeat()]
    beams = {"prompt": "a", "use_beam_search": True, "stream": True}
    status, body = await ask(gateway, "/v1/completions", {**beams, "n": 9})
    assert (status, body["error"]["param"]) == (400, "n") and "expected at most 8" in body["error"]["message"]
    status, body = await ask(gateway, "/v1/completions", {**beams, "n": 1, "best_of": 9})
    assert (status, body["error"]["param"]) == (400, "best_of")


async def test_lines_of_a_batch_wait_without_a_bound(start: Callable[..., Any], tmp_path: Path) -> None:
    """A line that has waited too long would have its result for good; a batch has the time."""
    gateway = await start(files_dir=tmp_path)
    async with client_of(gateway) as client:
        await begun(client, jsonl(line("a")))
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not gateway.engine.requests:
                await asyncio.sleep(0.01)
    assert gateway.engine.requests[-1].queue_deadline is None
