"""After a ready worker is gone, requests are accepted and wait for the next one, within limits."""

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
    """Start a gateway whose only worker was ready and is gone."""

    async def start(**changes: Any) -> Gateway:
        gateway = await start_gateway(FakeInferenceClient(says([5])), **changes)
        assert (await ask(gateway, "/ready"))[0] == 200
        gateway.engine.workers = [heartbeat(phase=WorkerPhase.LOAD)]
        return gateway

    return start


async def test_requests_without_worker_are_accepted_and_stay_ready(start: Callable[..., Any]) -> None:
    gateway = await start()
    assert (await ask(gateway, "/v1/completions", BODY))[0] == 200
    for path in ("/readyz", "/readyz?all=true"):  # a load balancer sends no requests to a gateway that is not ready
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
async def test_request_waits_for_its_own_or_the_restart_timeout(
    start: Callable[..., Any], options: dict[str, Any], asked: dict[str, Any], queue_deadline: float
) -> None:
    gateway = await start(**options)
    assert (await ask(gateway, "/v1/completions", {**BODY, **asked}))[0] == 200
    assert gateway.engine.requests[-1].queue_deadline == queue_deadline  # the fake fleet's clock is at 0


async def test_request_with_a_ready_worker_has_no_deadline(start: Callable[..., Any]) -> None:
    gateway = await start()
    gateway.engine.workers = [heartbeat()]
    assert (await ask(gateway, "/v1/completions", BODY))[0] == 200
    assert gateway.engine.requests[-1].queue_deadline is None


async def test_wait_ends_if_no_worker_returns(start: Callable[..., Any]) -> None:
    gateway = await start(no_worker_wait_seconds=30.0)
    gateway.engine.seconds_without_worker = 29.9
    assert (await ask(gateway, "/v1/completions", BODY))[0] == 200
    gateway.engine.seconds_without_worker = 30.0
    status, body = await ask(gateway, "/v1/completions", BODY)
    assert (status, body["error"]["code"]) == (503, "no_worker")
    assert gateway.metric("pagestream_requests_rejected_total", reason="no_worker") == 1
    assert [(await ask(gateway, path))[1]["state"] for path in ("/ready", "/readyz")] == ["no_worker"] * 2
    assert (await ask(gateway, "/readyz"))[0] == 503


async def test_no_worker_refuse_refuses_at_once(start: Callable[..., Any]) -> None:
    gateway = await start(no_worker="refuse")
    status, body = await ask(gateway, "/v1/completions", BODY)
    assert (status, body["error"]["code"]) == (503, "no_worker")
    assert (await ask(gateway, "/readyz"))[0] == 503


async def test_no_worker_queue_accepts_however_long_no_worker_is_there(start: Callable[..., Any]) -> None:
    gateway = await start(no_worker="queue")
    gateway.engine.seconds_without_worker = 1e6
    assert (await ask(gateway, "/v1/completions", BODY))[0] == 200
    assert (await ask(gateway, "/readyz"))[0] == 200
    assert gateway.engine.requests[-1].queue_deadline == 120.0


@pytest.mark.parametrize("no_worker", ["wait", "queue", "refuse"])
async def test_new_gateway_accepts_if_the_model_has_served_before(
    start_gateway: Callable[..., Any], no_worker: str
) -> None:
    gateway = await start_gateway(FakeInferenceClient(says([5])), no_worker=no_worker)
    gateway.engine.workers = []
    status, body = await ask(gateway, "/v1/completions", BODY)
    assert (status, body["error"]["code"]) == (503, "starting")
    gateway.engine.was_served = True
    status, body = await ask(gateway, "/v1/completions", BODY)
    if no_worker == "refuse":
        assert (status, body["error"]["code"]) == (503, "no_worker")
    else:
        assert status == 200


async def test_limits_of_the_last_worker_apply_without_one(start_gateway: Callable[..., Any]) -> None:
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


async def test_batch_lines_wait_without_a_deadline(start: Callable[..., Any], tmp_path: Path) -> None:
    """A timed-out line would keep its error forever, and a batch has time to wait."""
    gateway = await start(files_dir=tmp_path)
    async with client_of(gateway) as client:
        await begun(client, jsonl(line("a")))
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not gateway.engine.requests:
                await asyncio.sleep(0.01)
    assert gateway.engine.requests[-1].queue_deadline is None
