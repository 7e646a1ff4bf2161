"""The Messages API: the order of stream events, the request to the engine, and errors in Anthropic's format."""

import json
import re
from typing import Any

import pytest

from gateway.apis.anthropic.schema import parse_messages
from gateway.http.json_body import decode_body
from gateway.text.served_model import ServedModel
from shared.messages import ErrorCode, ErrorEvent, FinishReason, TokenEvent
from tests.gateway.conftest import MAX_MODEL_LEN, Gateway
from tests.gateway.fake_inference import finish, says

HI: dict[str, Any] = {"model": "tiny", "max_tokens": 20, "messages": [{"role": "user", "content": "hi"}]}


def ids(model: ServedModel, text: str) -> list[int]:
    return model.encoder.encode_text(text)


async def post(gateway: Gateway, body: dict[str, Any], url: str = "/v1/messages") -> tuple[int, Any]:
    async with gateway.session.post(url, json=body) as response:
        return response.status, await response.json()


async def events(gateway: Gateway, body: dict[str, Any]) -> list[tuple[str, Any]]:
    async with gateway.session.post("/v1/messages", json={**body, "stream": True}) as response:
        assert response.status == 200, await response.text()
        blocks = (await response.text()).split("\n\n")
    pairs = [block.split("\n") for block in blocks if block]
    return [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in pairs]


async def test_stream_events_are_in_order(gateway: Gateway, tiny_model: ServedModel) -> None:
    token_ids = ids(tiny_model, "It is é.")
    gateway.engine.script = says(*[[token_id] for token_id in token_ids])
    found = await events(gateway, HI)
    names = [name for name, _ in found]
    num_texts = names.count("content_block_delta")
    assert names == [
        "message_start",
        "content_block_start",
        *["content_block_delta"] * num_texts,
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert all(data["type"] == name for name, data in found)
    assert "".join(data["delta"]["text"] for name, data in found if name == "content_block_delta") == "It is é."
    start, delta = found[0][1]["message"], found[-2][1]
    num_prompt_tokens = len(gateway.engine.requests[0].prompt_token_ids)
    assert start["usage"]["input_tokens"] == num_prompt_tokens and start["stop_reason"] is None
    assert delta["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert delta["usage"]["output_tokens"] == len(token_ids)


@pytest.mark.parametrize(
    ("reason", "stops", "expected"),
    [
        (FinishReason.STOP, [], ("end_turn", None, "It is Paris.")),
        (FinishReason.LENGTH, [], ("max_tokens", None, "It is Paris.")),
        (FinishReason.LENGTH, ["xyz", "Par"], ("stop_sequence", "Par", "It is ")),
    ],
)
async def test_whole_answer_equals_stream(
    gateway: Gateway, tiny_model: ServedModel, reason: FinishReason, stops: list[str], expected: Any
) -> None:
    gateway.engine.script = says(*[[token_id] for token_id in ids(tiny_model, "It is Paris.")], reason=reason)
    body = {**HI, "stop_sequences": stops}
    status, whole = await post(gateway, body)
    assert status == 200 and whole["type"] == "message" and whole["role"] == "assistant"
    (block,) = whole["content"]
    assert (whole["stop_reason"], whole["stop_sequence"], block["text"]) == expected
    streamed = await events(gateway, body)
    delta = streamed[-2][1]
    assert {**whole["usage"], **whole} | delta["delta"] | {"usage": delta["usage"]} == {**whole["usage"], **whole}
    assert "".join(d["delta"]["text"] for n, d in streamed if n == "content_block_delta") == block["text"]


async def test_request_fields_reach_the_engine(gateway: Gateway, tiny_model: ServedModel) -> None:
    gateway.engine.script = says([70])
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]},
        {"role": "assistant", "content": "It is"},
    ]
    body = {**HI, "messages": messages, "system": [{"type": "text", "text": "be"}], "temperature": 0.5, "top_k": 3}
    assert (await post(gateway, {**body, "top_p": 0.9, "metadata": {"user_id": "u"}}))[0] == 200
    request = gateway.engine.requests[0]
    expected = "<|im_start|>system\nbe<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nIt is"
    assert request.prompt_token_ids == ids(tiny_model, expected)
    assert (request.sampling.temperature, request.sampling.top_k, request.sampling.top_p) == (0.5, 3, 0.9)
    assert request.sampling.max_tokens == 20
    counted = {key: body[key] for key in ("model", "messages", "system")}
    status, count = await post(gateway, counted, "/v1/messages/count_tokens")
    assert (status, count) == (200, {"input_tokens": len(request.prompt_token_ids)})


@pytest.mark.parametrize(
    ("change", "status", "kind", "param"),
    [
        ({"max_tokens": None}, 400, "invalid_request_error", "max_tokens"),
        ({"messages": []}, 400, "invalid_request_error", "messages"),
        ({"messages": [{"role": "developer", "content": "x"}]}, 400, "invalid_request_error", "messages[0].role"),
        ({"model": None}, 400, "invalid_request_error", "model"),
        ({"messages": [{"role": "user", "content": ""}]}, 400, "invalid_request_error", "messages[0].content"),
        ({"messages": [{"role": "user", "content": " \n"}]}, 400, "invalid_request_error", "messages[0].content"),
        ({"messages": [{"role": "user", "content": []}]}, 400, "invalid_request_error", "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": ""}]}]}, 400, "invalid_request_error",
         "messages[0].content[0].text"),
        ({"temperature": 1.5}, 400, "invalid_request_error", "temperature"),
        ({"stop_sequences": [""]}, 400, "invalid_request_error", "stop_sequences[0]"),
        ({"thinking": {"type": "enabled", "budget_tokens": 9}}, 400, "invalid_request_error", "thinking"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, 400, "invalid_request_error",
         "messages[0].content[0].type"),
        ({"model": "claude"}, 404, "not_found_error", "model"),
    ],
)  # fmt: skip
async def test_invalid_request_gets_an_anthropic_error(
    gateway: Gateway, change: dict[str, Any], status: int, kind: str, param: str
) -> None:
    found, body = await post(gateway, {**HI, **change})
    assert (found, body["type"], body["error"]["type"], body["error"]["param"]) == (status, "error", kind, param)
    assert body["request_id"].startswith("req_")


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}


@pytest.mark.parametrize(
    ("block", "param"),
    [
        (IMAGE, "messages[2].content[0].type"),
        (
            {"type": "tool_result", "tool_use_id": "toolu_1", "content": [IMAGE]},
            "messages[2].content[0].content[0].type",
        ),
    ],
)
async def test_image_is_refused_by_name(gateway: Gateway, block: dict[str, Any], param: str) -> None:
    call = {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {}}
    messages = [*HI["messages"], {"role": "assistant", "content": [call]}, {"role": "user", "content": [block]}]
    status, body = await post(gateway, {**HI, "messages": messages})
    expected = f"{param}: 'image' is not supported; this server reads text only."
    assert (status, body["error"]["param"], body["error"]["message"]) == (400, param, expected)


async def test_error_within_a_stream_is_its_last_event(gateway: Gateway) -> None:
    def breaks(request: Any) -> Any:
        yield TokenEvent(request.request_id, 0, [70])
        yield ErrorEvent(request.request_id, ErrorCode.REQUEST_FAILED, "")

    gateway.engine.script = breaks
    name, data = (await events(gateway, HI))[-1]
    assert (name, data["type"], data["error"]["type"]) == ("error", "error", "api_error")
    assert len(data["request_id"]) > len("req_")


@pytest.mark.parametrize(("sent", "expected"), [("job-7", "req_job-7"), ("req_01", "req_01"), ("", None)])
async def test_every_answer_has_anthropics_request_id_header(gateway: Gateway, sent: str, expected: str | None) -> None:
    gateway.engine.script = says([70])
    for body, url, status in (
        (HI, "/v1/messages", 200),
        ({**HI, "stream": True}, "/v1/messages", 200),
        ({**HI, "max_tokens": None}, "/v1/messages", 400),
        (HI, "/v1/messages/count_tokens", 200),
        ({}, "/v1/messages/count_tokens", 400),
        ({}, "/v1/messages/batches", 404),
    ):
        async with gateway.session.post(url, json=body, headers={"x-request-id": sent}) as response:
            text = await response.text()
        request_id = response.headers["request-id"]
        assert (response.status, request_id) == (status, expected or f"req_{response.headers['x-request-id']}")
        if status != 200:
            assert json.loads(text)["request_id"] == request_id
    async with gateway.session.post("/v1/chat/completions", json={}) as response:
        assert "request-id" not in response.headers and list(await response.json()) == ["error"]


async def test_model_is_required_here_but_optional_elsewhere(gateway: Gateway) -> None:
    gateway.engine.script = says([70])
    nameless = {key: value for key, value in HI.items() if key != "model"}
    for url in ("/v1/messages", "/v1/messages/count_tokens"):
        status, body = await post(gateway, nameless, url)
        assert (status, body["error"]["code"], body["error"]["param"]) == (400, "missing_required_parameter", "model")
    assert (await post(gateway, nameless, "/v1/chat/completions"))[0] == 200


async def test_system_messages_keep_their_positions(gateway: Gateway, tiny_model: ServedModel) -> None:
    gateway.engine.script = says([70])
    user, brief = HI["messages"][0], {"role": "system", "content": [{"type": "text", "text": "be brief"}]}
    messages = [{"role": "system", "content": "be kind"}, user, brief]
    assert (await post(gateway, {**HI, "system": "be", "messages": messages}))[0] == 200
    said = ("system\nbe", "system\nbe kind", "user\nhi", "system\nbe brief")
    prompt = "".join(f"<|im_start|>{message}<|im_end|>\n" for message in said) + "<|im_start|>assistant\n"
    assert gateway.engine.requests[0].prompt_token_ids == ids(tiny_model, prompt)
    refused = {**HI, "messages": [{"role": "system", "content": [{"type": "tool_result", "tool_use_id": "1"}]}]}
    status, body = await post(gateway, refused)
    assert (status, body["error"]["param"]) == (400, "messages[0].content[0].type")


SOURCE = {"type": "text", "media_type": "text/plain", "data": "Rome is old."}
PARTS = {"type": "content", "content": [{"type": "text", "text": "Rome"}, {"type": "text", "text": "is old."}]}


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        ({"source": SOURCE}, "<document_contents>\nRome is old.\n</document_contents>"),
        ({"source": PARTS, "title": "T", "context": "C", "citations": {"enabled": False}},
         "<title>T</title>\n<context>C</context>\n<document_contents>\nRome\nis old.\n</document_contents>"),
    ],
)  # fmt: skip
def test_text_documents_are_read(document: dict[str, Any], expected: str) -> None:
    block = {"type": "document", **document}
    expected = f"<document>\n{expected}\n</document>"
    content = [block, {"type": "text", "text": "How old?"}]
    (chat,) = parse_messages(
        decode_body(json.dumps({**HI, "messages": [{"role": "user", "content": content}]}).encode())
    ).prompts
    assert chat[0]["content"] == f"{expected}\nHow old?"  # type: ignore[index]
    used = {"type": "tool_use", "id": "1", "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "1", "content": [block]}
    messages = [{"role": "assistant", "content": [used]}, {"role": "user", "content": [result]}]
    (chat,) = parse_messages(decode_body(json.dumps({**HI, "messages": messages}).encode())).prompts
    assert chat[1]["content"] == expected  # type: ignore[index]


@pytest.mark.parametrize(
    ("document", "param"),
    [
        ({"source": {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="}}, "source.type"),
        ({"source": {"type": "url", "url": "https://example.com/a.pdf"}}, "source.type"),
        ({"source": {**SOURCE, "media_type": "text/html"}}, "source.media_type"),
        ({"source": SOURCE, "citations": {"enabled": True}}, "citations.enabled"),
    ],
)
async def test_other_documents_are_refused(gateway: Gateway, document: dict[str, Any], param: str) -> None:
    messages = [{"role": "user", "content": [{"type": "document", **document}]}]
    status, body = await post(gateway, {**HI, "messages": messages})
    assert (status, body["error"]["param"]) == (400, f"messages[0].content[0].{param}")


async def test_models_route_has_anthropics_format(start_gateway: Any) -> None:
    gateway = await start_gateway(served_model_name=("a", "b", "c"))

    async def listed(**query: str) -> tuple[list[str], bool]:
        headers = {"anthropic-version": "2023-06-01"}
        async with gateway.session.get("/v1/models", params=query, headers=headers) as response:
            assert response.status == 200 and response.headers["request-id"].startswith("req_")
            page = await response.json()
        names = [model["id"] for model in page["data"]]
        assert (page["first_id"], page["last_id"]) == ((names[0], names[-1]) if names else (None, None))
        assert all(model["type"] == "model" and model["display_name"] == model["id"] for model in page["data"])
        return names, page["has_more"]

    assert await listed() == (["a", "b", "c"], False)
    assert await listed(limit="2") == (["a", "b"], True)
    assert await listed(limit="2", after_id="b") == (["c"], False)
    assert await listed(limit="1", before_id="c") == (["b"], True)
    assert await listed(before_id="b", after_id="b") == ([], False)
    for query in ({"after_id": "d"}, {"limit": "0"}):
        async with gateway.session.get(
            "/v1/models", params=query, headers={"anthropic-version": "2023-06-01"}
        ) as response:
            body = await response.json()
        assert (response.status, body["type"], body["error"]["param"]) == (400, "error", *query)
    async with gateway.session.get("/v1/models") as response:
        assert (await response.json())["object"] == "list" and "request-id" not in response.headers


async def test_message_starts_before_its_first_token(start_gateway: Any, tiny_model: ServedModel) -> None:
    gateway: Gateway = await start_gateway(sse_keep_alive_seconds=0.001)
    async with gateway.session.post("/v1/messages", json={**HI, "stream": True}) as response:
        stream = await gateway.engine.next_stream()
        assert (await response.content.readuntil(b"\n\n")).startswith(b"event: message_start\n")
        for _ in range(2):
            assert await response.content.readuntil(b"\n\n") == b'event: ping\ndata: {"type":"ping"}\n\n'
        stream.send(TokenEvent(stream.request.request_id, 0, ids(tiny_model, "a")))
        stream.send(finish(stream.request, 1))
        assert '"text":"a"' in await response.text()


@pytest.mark.parametrize(
    ("content", "max_tokens", "words"),
    [
        ("hi", 10_000, r"input length and `max_tokens` exceed context limit: (\d+) \+ (\d+) > (\d+), decrease input"),
        ("z" * 4000, 5, r"prompt is too long: (\d+) tokens > (\d+) maximum"),
    ],
    ids=["answer", "prompt"],
)
async def test_context_error_has_anthropics_message(
    gateway: Gateway, content: str, max_tokens: int, words: str
) -> None:
    body = {**HI, "max_tokens": max_tokens, "messages": [{"role": "user", "content": content}]}
    status, error = await post(gateway, body)
    found = re.match(words, error["error"]["message"])
    assert status == 400 and found, error
    *asked, limit = map(int, found.groups())
    assert sum(asked) > limit == MAX_MODEL_LEN
