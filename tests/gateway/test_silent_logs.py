"""No log line of any level or library, and no metric, contains a prompt, an answer or a key."""

import asyncio
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gateway.text.served_model import ServedModel
from shared.logs import JsonFormatter
from shared.messages import ErrorCode, ErrorEvent, TokenEvent
from tests.gateway.auth.test_access import KEY, bearer, entry
from tests.gateway.conftest import Gateway
from tests.gateway.fake_inference import finish

PROMPT, ANSWER, WRONG_KEY = "canaryprompt", "canaryanswer", "canary-wrong-key-0123"
CANARIES = ("canary", KEY, "Y2FuYXJ5")  # the last one is base64


def chat(text: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **fields}


@pytest.mark.filterwarnings("ignore")  # this test needs asyncio's debug messages, not its warnings
async def test_session_logs_contain_no_secrets(
    start_gateway: Callable[..., Any], tiny_model: ServedModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys_file = tmp_path / "keys.toml"
    keys_file.write_text(entry("team-a", KEY))
    caplog.set_level(1)
    caplog.handler.setFormatter(JsonFormatter())  # with every `extra` field
    gateway: Gateway = await start_gateway(api_keys_file=keys_file)
    answer = tiny_model.encoder.encode_text(ANSWER, add_special_tokens=False)

    def script(request: Any) -> Any:
        yield TokenEvent(request.request_id, 0, answer)
        yield finish(request, len(answer))

    gateway.engine.script = script
    good = [chat(PROMPT), chat(PROMPT, stream=True), chat(PROMPT, stop="canary", cache_salt="canary", user="canary")]
    bad: list[Any] = [
        chat(PROMPT, temperature="canary"),
        chat(PROMPT, logit_bias={"canary": 1}),
        chat(PROMPT, model="canary"),
        chat(PROMPT, canary="canary", n=99),
        chat(PROMPT * 400),
        {"messages": [{"role": "canary", "content": PROMPT}]},
    ]
    for body in [*good, *bad]:
        async with gateway.session.post("/v1/chat/completions", json=body, headers=bearer(KEY)) as response:
            assert (response.status == 200) == (body in good)
            text = await response.text()
            assert (ANSWER in text) == (body is good[0])  # the second arrives in pieces; the third stops before its end
    for data in (b'{"messages":"canary', b'["canary"]', b"\xffcanary"):
        async with gateway.session.post("/v1/chat/completions", data=data, headers=bearer(KEY)) as response:
            assert response.status in (400, 415)
    for headers in (bearer(WRONG_KEY), {"x-api-key": WRONG_KEY}, {"Authorization": "Basic Y2FuYXJ5OmNhbmFyeQ=="}):
        async with gateway.session.post("/v1/completions?canary=1", json=chat(PROMPT), headers=headers) as response:
            assert response.status == 401
    for path in ("/canary", "/v1/models/canary", "/ui/canary"):
        async with gateway.session.get(path, headers=bearer(KEY)) as response:
            assert response.status == 404

    def fails(request: Any) -> Any:
        yield ErrorEvent(request.request_id, ErrorCode.REQUEST_FAILED, "it broke at canary")

    gateway.engine.script = fails
    async with gateway.session.post("/v1/chat/completions", json=chat(PROMPT), headers=bearer(KEY)) as response:
        assert response.status == 500
        assert "canary" not in await response.text()
    async with gateway.session.get("/metrics", headers=bearer(KEY)) as response:
        metrics = await response.text()
    await asyncio.sleep(0)
    assert len(caplog.records) >= len(good) + len(bad)  # there were logs to check
    logged = json.dumps([caplog.handler.format(record) for record in caplog.records])
    for canary in CANARIES:
        assert canary not in logged
        assert canary not in metrics
    assert logging.getLogger().isEnabledFor(1)


async def test_unknown_model_names_create_no_metric_series(start_gateway: Callable[..., Any]) -> None:
    gateway: Gateway = await start_gateway()

    async def num_series() -> int:
        async with gateway.session.get("/metrics") as response:
            return len((await response.text()).splitlines())

    async def ask(number: int) -> None:
        async with gateway.session.post("/v1/chat/completions", json=chat("hi", model=f"m{number}")) as response:
            assert response.status == 404
        async with gateway.session.request(("PROPFIND", "PURGE", "LINK")[number % 3], f"/path{number}") as response:
            assert response.status == 404

    await num_series()
    await ask(0)
    before = await num_series()
    for number in range(1, 50):
        await ask(number)
    assert await num_series() == before
