"""Probes, metrics, models and tokenization."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gateway.store.store_calls import StoreUnavailable
from gateway.text.served_model import ServedModel
from shared.messages import FinishReason, WorkerPhase
from tests.gateway.conftest import MAX_MODEL_LEN, Gateway
from tests.gateway.fake_inference import FakeInferenceClient, heartbeat, says
from tests.patience import PATIENCE_SECONDS

HI = [{"role": "user", "content": "hi"}]


async def get(gateway: Gateway, path: str) -> tuple[int, Any]:
    async with gateway.session.get(path) as response:
        return response.status, await response.json()


async def test_readiness_follows_the_phases(start_gateway: Any, tmp_path: Path, tiny_model_dir: Path) -> None:
    engine = FakeInferenceClient()
    engine.workers = []
    gateway = await start_gateway(engine, wait=False, model=tmp_path / "tiny")
    assert (await get(gateway, "/ready"))[1]["phase"] == "starting"
    engine.workers = [heartbeat("supervisor", WorkerPhase.DOWNLOAD, progress=0.4, detail="40 of 98 MB")]
    status, body = await get(gateway, "/ready")
    assert (status, body["state"], body["phase"], body["progress"]) == (503, "starting", "download", 0.4)
    assert body["detail"] == "40 of 98 MB" and body["workers"] == [] and body["elapsed_s"] >= 0
    engine.workers = [heartbeat("w.1", WorkerPhase.WARMUP, progress=0.5), heartbeat("w.2", WorkerPhase.LOAD)]
    status, body = await get(gateway, "/ready")
    assert (status, body["phase"], [worker["id"] for worker in body["workers"]]) == (503, "warmup", ["w.1", "w.2"])
    engine.workers = [heartbeat()]
    status, body = await get(gateway, "/ready")
    assert (status, body["state"]) == (503, "starting")  # a worker is ready, but the tokenizer is not loaded
    (tmp_path / "tiny").symlink_to(tiny_model_dir)
    await gateway.state.models_loaded.wait()
    status, body = await get(gateway, "/ready")
    assert (status, body["state"], body["phase"], body["progress"]) == (200, "ready", "ready", 1.0)
    engine.workers = []
    status, body = await get(gateway, "/ready")
    assert (status, body["state"]) == (503, "waiting")
    engine.seconds_without_worker = 120.0
    status, body = await get(gateway, "/ready")
    assert (status, body["state"]) == (503, "no_worker")


async def test_unservable_model_is_reported(start_gateway: Any, tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_text("[]")
    gateway = await start_gateway(wait=False, model=tmp_path)
    async with asyncio.timeout(PATIENCE_SECONDS):
        await gateway.state.model_failed.wait()


async def test_health_and_livez_answer(gateway: Gateway) -> None:
    async with gateway.session.get("/health") as response:
        assert (response.status, await response.read()) == (200, b"")
    gateway.engine.workers = [heartbeat(phase=WorkerPhase.DRAINING)]
    async with gateway.session.get("/health") as response:
        assert response.status == 503
    assert await get(gateway, "/livez") == (200, {"state": "alive"})


async def test_ping_and_load_answer_as_in_vllm(gateway: Gateway) -> None:
    async with gateway.session.get("/ping") as response:
        assert (response.status, await response.read()) == (200, b"")
    assert await get(gateway, "/load") == (200, {"server_load": 0})


async def test_readyz_requires_a_writable_store(gateway: Gateway) -> None:
    status, body = await get(gateway, "/readyz")
    assert (status, body) == (
        200,
        {"state": "ready", "store_write_seconds": 0.001, "ready_workers": 1, "ready_models": 1, "models": 1},
    )
    gateway.engine.store_error = StoreUnavailable("MISCONF")
    status, body = await get(gateway, "/readyz")
    assert (status, body["store_write_seconds"]) == (503, None)


async def test_fleet_shows_queue_and_workers(gateway: Gateway) -> None:
    beat = heartbeat(running=3, waiting=1, max_num_seqs=8, kv_blocks_total=100, kv_blocks_free=60, generated_tokens=7)
    gateway.engine.workers = [beat]
    status, body = await get(gateway, "/debug/fleet")
    [model] = body["models"]
    [worker] = model["workers"]
    assert (status, model["state"], model["generated_tokens"]) == (200, "ready", 7)
    assert model["queue"] == {"interactive": 2, "batch": 1}
    assert (worker["running"], worker["waiting"], worker["kv_blocks_used"]) == (3, 1, 40)
    gateway.engine.store_error = StoreUnavailable("MISCONF")
    status, body = await get(gateway, "/debug/fleet")
    assert (status, body["models"][0]["queue"]) == (200, None)


async def test_models_are_listed(gateway: Gateway) -> None:
    model = {
        "id": "tiny",
        "object": "model",
        "created": gateway.state.started_at_unix,
        "owned_by": "pagestream",
        "root": "tiny",
        "parent": None,
        "max_model_len": MAX_MODEL_LEN,
    }
    for path in ("/v1/models", "/models", "/v1//models"):
        assert await get(gateway, path) == (200, {"object": "list", "data": [model]})
    for path in ("/v1/models/tiny", "/models/tiny"):
        assert await get(gateway, path) == (200, model)


async def test_model_name_with_a_slash_is_found(start_gateway: Any) -> None:
    gateway = await start_gateway(served_model_name=("org/model",))
    assert (await get(gateway, "/v1/models/org/model"))[1]["id"] == "org/model"


async def test_other_paths_are_unknown(gateway: Gateway) -> None:
    for path in ("moderations", "audio/x", "embeddings/x"):
        async with gateway.session.post(f"/v1/{path}", json={}) as response:
            assert (response.status, (await response.json())["error"]["code"]) == (404, "unknown_url")


async def test_sound_and_images_are_not_served(gateway: Gateway) -> None:
    for path in ("audio/speech", "audio/transcriptions", "images/generations", "images/edits"):
        async with gateway.session.post(f"/v1/{path}", data=b"a form") as response:
            error = (await response.json())["error"]
            assert (response.status, error["code"]) == (501, "not_served")
            assert error["message"] == "This server reads and writes text only."


async def test_version_is_reported(gateway: Gateway) -> None:
    status, body = await get(gateway, "/version")
    assert status == 200 and list(body) == ["version"]


@pytest.mark.parametrize("prefix", ["", "/v1"])
async def test_tokenize_and_detokenize_are_inverse(gateway: Gateway, tiny_model: ServedModel, prefix: str) -> None:
    tokens = tiny_model.encoder.encode_text("the é")
    async with gateway.session.post(f"{prefix}/tokenize", json={"prompt": "the é", "model": "tiny"}) as response:
        assert await response.json() == {
            "count": len(tokens),
            "max_model_len": MAX_MODEL_LEN,
            "tokens": tokens,
            "token_strs": None,
        }
    async with gateway.session.post(f"{prefix}/detokenize", json={"tokens": tokens}) as response:
        assert await response.json() == {"prompt": "the é"}


async def test_tokenize_accepts_messages(gateway: Gateway, tiny_model: ServedModel) -> None:
    async with gateway.session.post("/tokenize", json={"messages": HI, "return_token_strs": True}) as response:
        body = await response.json()
    text = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert body["tokens"] == tiny_model.encoder.encode_text(text)
    assert body["token_strs"][0] == "<|im_start|>" and len(body["token_strs"]) == body["count"]


async def test_tokenize_works_before_a_worker_is_ready(start_gateway: Any) -> None:
    engine = FakeInferenceClient()
    engine.workers = []
    gateway = await start_gateway(engine)
    async with gateway.session.post("/tokenize", json={"prompt": "a"}) as response:
        assert response.status == 200


async def test_tokenize_before_the_model_is_loaded_is_refused(start_gateway: Any, tmp_path: Path) -> None:
    gateway = await start_gateway(wait=False, model=tmp_path / "later")
    async with gateway.session.post("/tokenize", json={"prompt": "a"}) as response:
        assert (response.status, (await response.json())["error"]["code"]) == (503, "starting")


async def test_answer_is_counted_in_metrics(gateway: Gateway) -> None:
    gateway.engine.script = says([5], [6, 7], reason=FinishReason.LENGTH)
    async with gateway.session.post("/v1/completions", json={"prompt": [5, 6], "stream": True}) as response:
        await response.read()
    counted = {
        "inter_token_latency_seconds_count": 1,
        "time_per_output_token_seconds_count": 1,
        "request_duration_seconds_count": 1,
        "request_prompt_tokens_sum": 2,
        "request_generation_tokens_sum": 3,
        "gateway_client_disconnects_total": 0,
    }
    assert {name: gateway.metric(f"pagestream_{name}") for name in counted} == counted
    first = "pagestream_time_to_first_token_seconds_count"
    assert [gateway.metric(first, **{"class": name}) for name in ("interactive", "batch")] == [1, 0]
    assert gateway.metric("pagestream_gateway_choices_finished_total", reason="length") == 1
    assert gateway.metric("pagestream_gateway_streams", route="/v1/completions") == 0
    labels = {"route": "/v1/completions", "method": "POST", "code": "200"}
    assert gateway.metric("pagestream_http_request_duration_seconds_count", **labels) == 1


async def test_scrape_has_all_metrics(gateway: Gateway) -> None:
    gateway.engine.counts.num_journal_reads = 4
    async with gateway.session.get("/metrics") as response:
        text = await response.text()
        assert response.headers["Content-Type"].startswith("text/plain; version=")
    for line in (
        'pagestream_queue_unfinished{model="tiny",stream="all"} 5.0',
        'pagestream_queue_unfinished{model="tiny",stream="batch"} 1.0',
        'pagestream_queue_depth{model="tiny",stream="all"} 3.0',
        'pagestream_queue_depth{model="tiny",stream="interactive"} 2.0',
        'pagestream_queue_pending{model="tiny",stream="all"} 2.0',
        'pagestream_queue_oldest_age_seconds{model="tiny",stream="interactive"} 1.5',
        'pagestream_queue_oldest_age_seconds{model="tiny",stream="all"} 60.0',
        "pagestream_redis_up 1.0",
        'pagestream_gateway_journal_reads_total{model="tiny"} 4.0',
        'pagestream_gateway_bad_messages_total{model="tiny"} 0.0',
        'pagestream_gateway_restored_requests_total{model="tiny"} 0.0',
        'pagestream_gateway_ready_workers{model="tiny"} 1.0',
    ):
        assert f"\n{line}\n" in text
    assert "_created" not in text
    gateway.engine.store_error = StoreUnavailable("down")
    async with gateway.session.get("/metrics") as response:
        assert "\npagestream_redis_up 0.0\n" in await response.text()
    async with gateway.session.head("/metrics") as response:
        assert response.status == 200


async def test_metric_labels_are_bounded(gateway: Gateway) -> None:
    for index in range(30):
        async with gateway.session.request("PROPFIND", f"/nowhere/{index}") as response:
            assert response.status == 404
        body = {"messages": HI, "model": f"m{index}"}
        async with gateway.session.post("/v1/chat/completions", json=body) as response:
            assert response.status == 404
    labels = {"route": "unknown", "method": "other", "code": "404"}
    assert gateway.metric("pagestream_http_request_duration_seconds_count", **labels) == 30
    labels = {"route": "/v1/chat/completions", "method": "POST", "code": "404"}
    assert gateway.metric("pagestream_http_request_duration_seconds_count", **labels) == 30


async def test_unexpected_error_reveals_nothing(gateway: Gateway, caplog: pytest.LogCaptureFixture) -> None:
    gateway.engine.submit_error = RuntimeError("/srv/secret")
    async with gateway.session.post("/v1/completions", json={"prompt": "a"}) as response:
        text = await response.text()
    assert response.status == 500 and "secret" not in text
    assert json.loads(text)["error"]["code"] == "internal"
    assert "/srv/secret" in caplog.text


@pytest.mark.parametrize("accept", ["text/plain", "application/openmetrics-text; version=1.0.0"])
async def test_metrics_are_repeated_under_vllm_names(start_gateway: Callable[..., Any], accept: str) -> None:
    gateway = await start_gateway(vllm_metric_names=True)
    async with gateway.session.get("/metrics", headers={"Accept": accept}) as response:
        text = await response.text()
    assert 'vllm:time_to_first_token_seconds_count{engine="0",model_name="tiny"} 0.0' in text
    assert 'pagestream_time_to_first_token_seconds_count{class="batch",model="tiny"} 0.0' in text
