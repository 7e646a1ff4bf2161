"""Anthropic's API: the order of a stream's events, what a request becomes, and errors in its words."""

import json
from typing import Any

import pytest

from gateway.text.served_model import ServedModel
from shared.messages import ErrorCode, ErrorEvent, FinishReason, TokenEvent
from tests.gateway.conftest import Gateway
from tests.gateway.fake_inference import says

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


async def test_the_events_of_a_stream_in_their_order(gateway: Gateway, tiny_model: ServedModel) -> None:
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
async def test_whole_and_streamed_agree(
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


async def test_what_the_engine_is_asked(gateway: Gateway, tiny_model: ServedModel) -> None:
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
        ({"messages": [{"role": "system", "content": "x"}]}, 400, "invalid_request_error", "messages[0].role"),
        ({"temperature": 1.5}, 400, "invalid_request_error", "temperature"),
        ({"stop_sequences": [""]}, 400, "invalid_request_error", "stop_sequences[0]"),
        ({"thinking": {"type": "enabled", "budget_tokens": 9}}, 400, "invalid_request_error", "thinking"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, 400, "invalid_request_error",
         "messages[0].content[0].type"),
        ({"model": "claude"}, 404, "not_found_error", "model"),
    ],
)  # fmt: skip
async def test_errors_in_anthropics_words(
    gateway: Gateway, change: dict[str, Any], status: int, kind: str, param: str
) -> None:
    found, body = await post(gateway, {**HI, **change})
    assert (found, body["type"], body["error"]["type"], body["error"]["param"]) == (status, "error", kind, param)


async def test_an_error_within_a_stream_is_its_last_event(gateway: Gateway) -> None:
    def breaks(request: Any) -> Any:
        yield TokenEvent(request.request_id, 0, [70])
        yield ErrorEvent(request.request_id, ErrorCode.REQUEST_FAILED, "")

    gateway.engine.script = breaks
    name, data = (await events(gateway, HI))[-1]
    assert (name, data["type"], data["error"]["type"]) == ("error", "error", "api_error")
