"""Rate limits apply before any work, on every route; every request that was begun is counted."""

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gateway.auth.access import OPEN_ROUTES
from shared.messages import Grammar
from tests.gateway.auth.test_access import KEY, OTHER, PROMPT, bearer, entry
from tests.gateway.conftest import Gateway
from tests.gateway.fake_inference import finish, says

HEADERS = bearer(KEY)
JSON = {"Content-Type": "application/json"}
DEEP = b'{"messages":' + b"[" * 100


async def limited(start_gateway: Callable[..., Any], tmp_path: Path, **limits: int) -> Gateway:
    keys = tmp_path / "keys.toml"
    keys.write_text(entry("a", KEY, **limits) + entry("b", OTHER))
    return await start_gateway(api_keys_file=keys, files_dir=tmp_path / "files")


async def spent(start_gateway: Callable[..., Any], tmp_path: Path) -> Gateway:
    """Return a gateway with a key that has used its only request."""
    gateway = await limited(start_gateway, tmp_path, requests_per_minute=1)
    async with gateway.session.post("/tokenize", json={"prompt": "the"}, headers=HEADERS) as reply:
        assert reply.status == 200
    return gateway


async def test_every_working_route_is_refused_before_its_work(
    start_gateway: Callable[..., Any], tmp_path: Path
) -> None:
    """Do not even look at bodies that are invalid."""
    gateway = await spent(start_gateway, tmp_path)
    uncharged = {operation.described_path for operation in gateway.operations if operation.uncharged}
    assert uncharged > OPEN_ROUTES
    assert not [op for op in gateway.operations if op.uncharged and (op.generates or op.is_admitted)]
    for method, path in gateway.routes:
        url = path.replace("{id}", "tiny").replace("{name}", "page.js")
        async with gateway.session.request(method, url, data=DEEP, headers={**HEADERS, **JSON}) as reply:
            assert (reply.status == 429) == (path not in uncharged), (method, path, reply.status)
            if reply.status == 429:
                assert int(reply.headers["Retry-After"]) >= 1
    assert gateway.engine.requests == []
    async with gateway.session.post("/tokenize", data=DEEP, headers={**bearer(OTHER), **JSON}) as reply:
        assert reply.status == 400


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": ["the"] * 32}),
        ("/v1/completions", {"prompt": "the", "bad_words": ["the"] * 500}),
        ("/v1/completions", {"prompt": "the", "guided_regex": "a+"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "the"}]}),
        ("/v1/responses", {"input": "the"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "the"}], "max_tokens": 1}),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "the"}]}),
        ("/tokenize", {"prompt": "the"}),
        ("/detokenize", {"tokens": [5]}),
    ],
)
async def test_request_over_its_limit_computes_nothing(
    start_gateway: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    gateway = await spent(start_gateway, tmp_path)
    work: list[str] = []
    encoder = type(gateway.service.require_model().encoder)
    for name in ("encode_text", "render_chat", "encode_chat", "decode", "min_num_tokens"):
        monkeypatch.setattr(encoder, name, lambda *_, name=name, **__: work.append(name))
    monkeypatch.setattr("gateway.http.json_body.msgspec.json.decode", lambda *_, **__: work.append("decode"))
    monkeypatch.setattr("gateway.pipeline.plan.check_grammar", lambda *_: work.append("grammar"))
    async with gateway.session.post(path, json=body, headers=HEADERS) as reply:
        assert reply.status == 429
    assert work == []


async def test_failed_request_counts_as_a_request(start_gateway: Callable[..., Any], tmp_path: Path) -> None:
    gateway = await limited(start_gateway, tmp_path, requests_per_minute=3)
    bodies = ({**PROMPT, "max_tokens": -1}, {**PROMPT, "guided_regex": "("}, {"model": "nobody", **PROMPT}, PROMPT)
    statuses = []
    for body in bodies:
        async with gateway.session.post("/v1/completions", json=body, headers=HEADERS) as reply:
            statuses.append(reply.status)
    assert statuses == [400, 400, 404, 429]


async def test_reserve_is_returned_for_any_end_of_a_request(start_gateway: Callable[..., Any], tmp_path: Path) -> None:
    gateway = await limited(start_gateway, tmp_path, tokens_per_minute=60)
    for body in ({**PROMPT, "max_tokens": -1}, {**PROMPT, "guided_regex": "("}):
        async with gateway.session.post("/v1/completions", json=body, headers=HEADERS) as reply:
            assert reply.status == 400
    body = {**PROMPT, "max_tokens": 90, "stream": True}
    async with gateway.session.post("/v1/completions", json=body, headers=HEADERS) as reply:
        assert reply.status == 200
        async with gateway.session.post("/v1/completions", json=PROMPT, headers=HEADERS) as refused:
            assert (refused.status, (await refused.json())["error"]["code"]) == (429, "tokens_per_minute_exceeded")
        reply.close()  # the client leaves
    await gateway.engine.next_cancellation()
    gateway.state.open_requests.draining = True
    async with gateway.session.post("/v1/completions", json=PROMPT, headers=HEADERS) as reply:
        assert (reply.status, (await reply.json())["error"]["code"]) == (503, "draining")
    gateway.state.open_requests.draining = False
    gateway.engine.script = says([5])
    async with gateway.session.post("/v1/completions", json=PROMPT, headers=HEADERS) as reply:
        assert reply.status == 200


async def test_idempotent_repeat_is_charged_if_it_is_new(start_gateway: Callable[..., Any], tmp_path: Path) -> None:
    gateway = await limited(start_gateway, tmp_path, tokens_per_minute=60)
    named = {**HEADERS, "Idempotency-Key": "mine"}
    body = {**PROMPT, "max_tokens": 90, "stream": True}
    async with gateway.session.post("/v1/completions", json=body, headers=HEADERS) as reply:
        stream = await gateway.engine.next_stream()
        async with gateway.session.post("/v1/completions", json=PROMPT, headers=named) as refused:
            assert (refused.status, (await refused.json())["error"]["code"]) == (429, "tokens_per_minute_exceeded")
        stream.send(finish(stream.request, 0))
        assert (await reply.read()).endswith(b"data: [DONE]\n\n")
    assert len(gateway.engine.requests) == 1


async def test_unserved_request_is_refused_before_grammar_check(
    start_gateway: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway: Gateway = await start_gateway()
    checked: list[Grammar] = []
    monkeypatch.setattr("gateway.pipeline.plan.check_grammar", checked.append)
    gateway.state.open_requests.draining = True
    async with gateway.session.post("/v1/completions", json={**PROMPT, "guided_regex": "a+"}) as reply:
        assert reply.status == 503
    assert checked == []


async def test_checks_of_one_key_do_not_delay_other_keys(
    start_gateway: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = await limited(start_gateway, tmp_path)
    gateway.engine.script = says([5])
    may_end = threading.Event()

    def check(grammar: Grammar) -> None:
        if grammar.text == "hard":
            may_end.wait()

    monkeypatch.setattr("gateway.pipeline.plan.check_grammar", check)

    async def status(key: str, regex: str) -> int:
        body = {**PROMPT, "guided_regex": regex}
        async with gateway.session.post("/v1/completions", json=body, headers=bearer(key)) as reply:
            return reply.status

    hard = [asyncio.create_task(status(KEY, "hard")) for _ in range(20)]
    while not gateway.state.readers.num_waiting:
        await asyncio.sleep(0.01)
    assert [await status(OTHER, "easy") for _ in range(3)] == [200] * 3
    assert not any(task.done() for task in hard)
    may_end.set()
    assert await asyncio.gather(*hard) == [200] * 20


async def test_gateway_slots_are_taken_when_granted(start_gateway: Callable[..., Any]) -> None:
    """Taking them after prompt encoding would admit all requests that arrive in the meantime."""
    gateway: Gateway = await start_gateway(max_num_streams=1)
    async with gateway.session.post("/v1/completions", json={**PROMPT, "stream": True}) as reply:
        assert reply.status == 200
        async with gateway.session.post("/v1/completions", json=PROMPT) as refused:
            assert (refused.status, (await refused.json())["error"]["code"]) == (503, "gateway_full")
