"""Two models on one gateway have separate names, engines, readiness and metrics; a key may be limited to one model."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from gateway.auth.api_keys import digest_of
from gateway.store.store_calls import StoreUnavailable
from shared.kv_snapshot import KVMove, KVRequest, KVSnapshot
from shared.messages import WorkerPhase
from tests.gateway.conftest import MAX_MODEL_LEN, Gateway
from tests.gateway.fake_inference import FakeInferenceClient, heartbeat, says
from tests.patience import PATIENCE_SECONDS

KEY, ONLY_SMALL = "k" * 20, "s" * 20

Two = Callable[..., Awaitable[Gateway]]


@pytest.fixture
def engines() -> list[FakeInferenceClient]:
    return [FakeInferenceClient(says([5])), FakeInferenceClient(says([5]))]


@pytest.fixture
def two(
    start_gateway: Callable[..., Any], engines: list[FakeInferenceClient], tiny_model_dir: Path, tmp_path: Path
) -> Two:
    async def start(**changes: Any) -> Gateway:
        path = tmp_path / "models.toml"
        path.write_text(
            f'[[models]]\nmodel = "{tiny_model_dir}"\nnames = ["large", "gpt-4o"]\n'
            f'[[models]]\nmodel = "{tiny_model_dir}"\nnames = ["org/small"]\nmax_model_len = 16\n'
        )
        return await start_gateway(*engines, models_file=path, **changes)

    return start


async def ask(gateway: Gateway, path: str, body: dict[str, Any] | None = None, key: str = "") -> tuple[int, Any]:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    method = "GET" if body is None else "POST"
    async with gateway.session.request(method, path, json=body, headers=headers) as response:
        text = await response.text()
        return response.status, json.loads(text) if text else None


@pytest.mark.parametrize(("asked", "answered"), [("large", 0), ("gpt-4o", 0), ("org/small", 1)])
async def test_model_of_a_request_selects_the_engine(
    two: Two, engines: list[FakeInferenceClient], asked: str, answered: int
) -> None:
    gateway = await two()
    for path, prompt in (("/v1/completions", {"prompt": "a"}), ("/v1/messages", {})):
        body = {"model": asked, "max_tokens": 4, "messages": [{"role": "user", "content": "hi"}], **prompt}
        status, answer = await ask(gateway, path, body)
        # the answer to an alias contains the name
        assert (status, answer["model"]) == (200, ["large", "org/small"][answered])
    assert [len(engine.requests) for engine in engines] == [2 * (answered == 0), 2 * (answered == 1)]


async def test_missing_or_unknown_model_is_refused(two: Two, engines: list[FakeInferenceClient]) -> None:
    gateway = await two()
    for path, body in (("/v1/completions", {"prompt": "a"}), ("/tokenize", {"prompt": "a"})):
        status, answer = await ask(gateway, path, body)
        assert (status, answer["error"]["param"]) == (400, "model")
        assert answer["error"]["code"] == "missing_required_parameter"
        status, answer = await ask(gateway, path, {**body, "model": "small"})
        assert (status, answer["error"]["param"], answer["error"]["code"]) == (404, "model", "model_not_found")
        assert answer["error"]["message"].endswith("this server has 'large', 'gpt-4o', 'org/small'.")
    assert [engine.requests for engine in engines] == [[], []]


async def test_each_model_has_its_own_limits(two: Two) -> None:
    gateway = await two()
    prompt = {"prompt": [5] * 16, "max_tokens": 1}
    assert (await ask(gateway, "/v1/completions", {**prompt, "model": "large"}))[0] == 200
    status, answer = await ask(gateway, "/v1/completions", {**prompt, "model": "org/small"})
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    assert (await ask(gateway, "/tokenize", {"prompt": "a", "model": "org/small"}))[1]["max_model_len"] == 16


async def test_every_name_is_listed(two: Two) -> None:
    gateway = await two()
    _, models = await ask(gateway, "/models")
    assert [(model["id"], model["root"], model["max_model_len"]) for model in models["data"]] == [
        ("large", "large", MAX_MODEL_LEN),
        ("gpt-4o", "large", MAX_MODEL_LEN),
        ("org/small", "org/small", 16),
    ]
    assert (await ask(gateway, "/v1/models/gpt-4o"))[1]["root"] == "large"
    assert (await ask(gateway, "/v1/models/org/small"))[1]["id"] == "org/small"
    assert (await ask(gateway, "/v1/models/small"))[0] == 404


async def test_model_without_workers_refuses_only_its_own_requests(
    two: Two, engines: list[FakeInferenceClient]
) -> None:
    gateway = await two(no_worker="refuse")
    assert (await ask(gateway, "/ready"))[1]["models"] == {"large": "ready", "org/small": "ready"}
    assert (await ask(gateway, "/readyz?all=true"))[0] == 200
    engines[0].workers = []
    status, answer = await ask(gateway, "/v1/completions", {"model": "gpt-4o", "prompt": "a"})
    assert (status, answer["error"]["code"]) == (503, "no_worker")
    assert (await ask(gateway, "/v1/completions", {"model": "org/small", "prompt": "a"}))[0] == 200
    status, ready = await ask(gateway, "/ready")
    assert (status, ready["state"], ready["models"]) == (200, "ready", {"large": "no_worker", "org/small": "ready"})
    assert [worker["id"] for worker in ready["workers"]] == ["w.1"]
    assert (await ask(gateway, "/ready?model=gpt-4o"))[1]["state"] == "no_worker"
    assert [(await ask(gateway, f"/health?model={name}"))[0] for name in ("large", "org/small", "x")] == [503, 200, 404]
    status, ready = await ask(gateway, "/readyz")
    assert (status, ready["state"], ready["ready_models"], ready["models"]) == (200, "ready", 1, 2)
    assert (await ask(gateway, "/readyz?all=true"))[0] == 503
    engines[1].workers = [heartbeat(phase=WorkerPhase.DRAINING)]
    assert [(await ask(gateway, path))[0] for path in ("/ready", "/readyz", "/health")] == [503, 503, 503]


async def test_metrics_are_labeled_by_model(two: Two, engines: list[FakeInferenceClient]) -> None:
    gateway = await two(vllm_metric_names=True)
    assert (await ask(gateway, "/v1/completions", {"model": "org/small", "prompt": "a"}))[0] == 200
    engines[0].workers = []
    async with gateway.session.get("/metrics") as response:
        text = await response.text()
    for line in (
        'pagestream_request_duration_seconds_count{model="large"} 0.0',
        'pagestream_request_duration_seconds_count{model="org/small"} 1.0',
        'pagestream_gateway_ready_workers{model="large"} 0.0',
        'pagestream_gateway_ready_workers{model="org/small"} 1.0',
        'vllm:e2e_request_latency_seconds_count{engine="0",model_name="large"} 0.0',
        'vllm:e2e_request_latency_seconds_count{engine="0",model_name="org/small"} 1.0',
    ):
        assert f"\n{line}\n" in text
    assert text.count("# TYPE pagestream_request_duration_seconds histogram") == 1
    engines[1].store_error = StoreUnavailable("down")
    async with gateway.session.get("/metrics") as response:
        assert "\npagestream_redis_up 0.0\n" in await response.text()


async def test_stored_answer_is_found_without_its_model_name(
    two: Two, engines: list[FakeInferenceClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = await two()
    stored: list[list[str]] = []
    for engine in engines:
        monkeypatch.setattr(engine, "stored", _recorded(stored))
    status, answer = await ask(gateway, f"/v1/requests/{'a' * 32}")
    assert (status, answer["error"]["code"]) == (404, "request_not_found")
    assert stored == [["a" * 32], ["a" * 32]]


def _recorded(calls: list[list[str]]) -> Callable[[list[str]], Awaitable[list[None]]]:
    async def stored(request_ids: list[str]) -> list[None]:
        calls.append(request_ids)
        return [None for _ in request_ids]

    return stored


@pytest.fixture
async def guarded(two: Two, tmp_path: Path) -> Gateway:
    path = tmp_path / "keys.toml"
    path.write_text(
        f'[[keys]]\nname = "all"\nsha256 = "{digest_of(KEY.encode())}"\n'
        f'[[keys]]\nname = "one"\nsha256 = "{digest_of(ONLY_SMALL.encode())}"\nmodels = ["org/small", "later"]\n'
    )
    return await two(api_keys_file=path)


async def test_key_of_one_model_sees_no_other(guarded: Gateway, engines: list[FakeInferenceClient]) -> None:
    async def ids(key: str) -> list[str]:
        return [model["id"] for model in (await ask(guarded, "/v1/models", key=key))[1]["data"]]

    assert (await ids(KEY), await ids(ONLY_SMALL)) == (["large", "gpt-4o", "org/small"], ["org/small"])
    for name in ("large", "gpt-4o"):
        status, answer = await ask(guarded, "/v1/completions", {"model": name, "prompt": "a"}, ONLY_SMALL)
        assert (status, answer["error"]["code"]) == (404, "model_not_found")
        assert answer["error"]["message"].endswith("this server has 'org/small'.")
        assert (await ask(guarded, f"/v1/models/{name}", key=ONLY_SMALL))[0] == 404
        assert (await ask(guarded, f"/debug/kv/stream?model={name}", key=ONLY_SMALL))[0] == 404
    assert (await ask(guarded, "/ready", key=ONLY_SMALL))[1]["models"] == {"org/small": "ready"}
    assert "large" not in json.dumps((await ask(guarded, "/readyz"))[1])
    assert (await ask(guarded, "/v1/completions", {"prompt": "a"}, ONLY_SMALL))[0] == 200  # its only one
    assert [len(engine.requests) for engine in engines] == [0, 1]


async def test_key_sees_only_blocks_of_its_own_requests(guarded: Gateway, engines: list[FakeInferenceClient]) -> None:
    def request(number: int, tenant: str) -> KVRequest:
        return KVRequest(
            id=f"id{number}#0", state="running", num_tokens=1000 + number, num_computed_tokens=2000 + number,
            blocks=[3000 + number], host_blocks=[4000 + number], tenant=tenant,
        )  # fmt: skip

    def move(number: int, request_id: str, tenant: str) -> KVMove:
        return KVMove(
            number=number, kind="grow", request_id=request_id, reason="", num_blocks=5000 + number,
            num_bytes=6000 + number, num_tokens=7000 + number, tenant=tenant,
        )  # fmt: skip

    owners = ["all", "one", "", "?"]  # without a key: from before keys were set; of an unknown key
    requests = [request(number, tenant) for number, tenant in enumerate(owners)]
    moves = [move(number, f"id{number}", tenant) for number, tenant in enumerate(owners)] + [move(9, "", "?")]
    snapshot = KVSnapshot(worker="w", block_size=16, states="pasf", requests=requests, events=moves)
    for key, own in ((KEY, 0), (ONLY_SMALL, 1)):
        headers = {"Authorization": f"Bearer {key}"}
        async with asyncio.timeout(PATIENCE_SECONDS):
            while engines[1].kv.num_watchers:  # the previous one
                await asyncio.sleep(0.01)
        engines[1].kv.snapshots.put_nowait(snapshot)
        async with guarded.session.get("/debug/kv/stream?model=org/small", headers=headers) as response:
            line = (await response.content.readline()).removeprefix(b"data: ")
        shown = json.loads(line)
        assert (shown["states"], [found["num_tokens"] for found in shown["requests"]]) == ("pasf", [1000 + own])
        assert [found["request_id"] for found in shown["events"]] == [f"id{own}", ""]
        for other in {0, 1, 2, 3} - {own}:
            traces = [f"id{other}", *(str(1000 * kind + other) for kind in range(1, 8))]
            assert not [trace for trace in traces if trace.encode() in line]


@pytest.mark.parametrize(("query", "watched"), [("", [1, 1]), ("?model=gpt-4o", [1, 0]), ("?model=org/small", [0, 1])])
async def test_blocks_of_all_models_or_of_one_are_listed(
    two: Two, engines: list[FakeInferenceClient], query: str, watched: list[int]
) -> None:
    gateway = await two()
    async with gateway.session.get(f"/debug/kv/stream{query}") as response:
        assert response.status == 200
        async with asyncio.timeout(PATIENCE_SECONDS):
            while [engine.kv.num_watchers for engine in engines] != watched:
                await asyncio.sleep(0.01)
