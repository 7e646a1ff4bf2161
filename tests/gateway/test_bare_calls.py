"""Tool calls without marks, through the whole gateway in three APIs: streamed events and whole answers."""

import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from shared.messages import FinishReason
from tests.gateway.conftest import Gateway
from tests.gateway.responses import WEATHER, checked_events, checked_response, model_says
from tests.tiny_model import write_tiny_model

PROPERTIES = WEATHER["parameters"]
FUNCTION = {"name": "get_weather", "description": "The weather of a city", "parameters": PROPERTIES}
HI = [{"role": "user", "content": "hi"}]
CHAT = {"messages": HI, "tools": [{"type": "function", "function": FUNCTION}], "max_tokens": 500}
RESPONSE = {"input": "hi", "tools": [WEATHER], "max_output_tokens": 500}
MESSAGE = {
    "model": "roomy",
    "max_tokens": 500,
    "messages": HI,
    "tools": [{"name": "get_weather", "input_schema": PROPERTIES}],
}

ARGUMENTS = '{\n  "city": "Zürich"\n}'
CALL = f'{{"name": "get_weather", "arguments": {ARGUMENTS}}}'
CALLS = [CALL, f"```json\n{CALL}\n```"]
ANSWERS = [
    '{"name": "Alice", "age": 3}',
    '{"name": "get_weather", "arguments": {"city": "Rome"}, "why": "you asked"}',
    '{"name": "get_time", "arguments": {}}',
    "```json\n[1, 2]\n```",
    CALL[:-1],
]

Ask = Callable[..., Awaitable[Any]]


@pytest.fixture
async def gateway(start_gateway: Any, tmp_path: Path) -> Gateway:
    model = write_tiny_model(tmp_path / "roomy", max_model_len=4096)
    return await start_gateway(model=model)


async def post(gateway: Gateway, url: str, body: dict[str, Any]) -> str:
    async with gateway.session.post(url, json=body) as response:
        text = await response.text()
        assert response.status == 200, text
        return text


def data_lines(text: str) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


async def chat_deltas(gateway: Gateway, **fields: Any) -> list[Any]:
    """Return what each chunk adds, without ids; a token that adds nothing has a chunk with empty content."""
    chunks = data_lines(await post(gateway, "/v1/chat/completions", {**CHAT, "stream": True, **fields}))
    found = []
    for chunk in chunks:
        (choice,) = chunk["choices"]
        for call in choice["delta"].get("tool_calls", ()):
            call.pop("id", None)
        found.append((choice["delta"], choice["finish_reason"]))
    return [found[0], *(delta for delta in found[1:] if delta != ({"content": ""}, None))]


@pytest.mark.parametrize("text", CALLS, ids=["bare", "in a block of code"])
async def test_bare_call_in_chat_is_parsed(gateway: Gateway, text: str) -> None:
    model_says(gateway, text)
    whole = json.loads(await post(gateway, "/v1/chat/completions", CHAT))["choices"][0]
    (call,) = whole["message"]["tool_calls"]
    assert call["function"] == {"name": "get_weather", "arguments": ARGUMENTS}
    assert (whole["message"]["content"], whole["finish_reason"]) == (None, "tool_calls")
    function = {"name": "get_weather", "arguments": ARGUMENTS}
    assert await chat_deltas(gateway) == [
        ({"role": "assistant", "content": ""}, None),
        ({"tool_calls": [{"index": 0, "type": "function", "function": function}]}, None),
        ({}, "tool_calls"),
    ]


@pytest.mark.parametrize("text", CALLS, ids=["bare", "in a block of code"])
async def test_bare_call_in_responses_is_parsed(gateway: Gateway, text: str) -> None:
    model_says(gateway, text)
    whole = checked_response(json.loads(await post(gateway, "/v1/responses", RESPONSE)))
    found = [(item.type, item.name, item.arguments) for item in whole.output if item.type == "function_call"]
    assert found == [("function_call", "get_weather", ARGUMENTS)] and len(whole.output) == 1
    events = checked_events(await post(gateway, "/v1/responses", {**RESPONSE, "stream": True}))
    assert [event.type.removeprefix("response.") for event in events] == [
        "created",
        "in_progress",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    assert (events[3].delta, events[4].arguments) == (ARGUMENTS, ARGUMENTS)


@pytest.mark.parametrize("text", CALLS, ids=["bare", "in a block of code"])
async def test_bare_call_in_messages_is_parsed(gateway: Gateway, text: str) -> None:
    model_says(gateway, text)
    whole = json.loads(await post(gateway, "/v1/messages", MESSAGE))
    (block,) = whole["content"]
    assert (block["type"], block["name"], block["input"]) == ("tool_use", "get_weather", {"city": "Zürich"})
    assert whole["stop_reason"] == "tool_use"
    events = data_lines(await post(gateway, "/v1/messages", {**MESSAGE, "stream": True}))
    assert [event["type"] for event in events] == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert events[1]["content_block"]["name"] == "get_weather"
    assert events[2]["delta"] == {"type": "input_json_delta", "partial_json": ARGUMENTS}
    assert events[4]["delta"]["stop_reason"] == "tool_use"


@pytest.mark.parametrize("text", ANSWERS)
async def test_other_json_is_unchanged_text(gateway: Gateway, text: str) -> None:
    model_says(gateway, text)
    (choice,) = json.loads(await post(gateway, "/v1/chat/completions", CHAT))["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (text, "stop")
    assert "".join(delta.get("content", "") for delta, _ in await chat_deltas(gateway)) == text
    whole = checked_response(json.loads(await post(gateway, "/v1/responses", RESPONSE)))
    assert whole.output_text == text
    (block,) = json.loads(await post(gateway, "/v1/messages", MESSAGE))["content"]
    assert block == {"type": "text", "text": text}


async def test_answer_is_streamed_once_it_cannot_be_a_call(gateway: Gateway) -> None:
    """Begin with the first letter that no offered name has, and continue token by token."""
    model_says(gateway, '{"name": "get_time", "a": 1}')
    deltas = [delta["content"] for delta, _ in await chat_deltas(gateway) if delta.get("content")]
    assert deltas[:3] == ['{"name": "get_t', "i", "m"]


@pytest.mark.parametrize("fields", [{"tool_choice": "none"}, {"tools": []}], ids=["none", "no tools"])
async def test_bare_call_without_tools_is_text(gateway: Gateway, fields: dict[str, Any]) -> None:
    model_says(gateway, CALL)
    deltas = await chat_deltas(gateway, **fields)
    assert "".join(delta.get("content", "") for delta, _ in deltas) == CALL and deltas[-1] == ({}, "stop")
    whole = json.loads(await post(gateway, "/v1/chat/completions", {**CHAT, **fields}))["choices"][0]
    assert whole["message"]["content"] == CALL
    assert (
        checked_response(json.loads(await post(gateway, "/v1/responses", {**RESPONSE, **fields}))).output_text == CALL
    )


async def test_truncated_bare_call_is_text(gateway: Gateway) -> None:
    model_says(gateway, CALL[:-4], FinishReason.LENGTH)
    deltas = await chat_deltas(gateway)
    assert deltas[1:] == [({"content": CALL[:-4]}, None), ({}, "length")]


async def test_llama_parser_streams_arguments(start_gateway: Any, tmp_path: Path) -> None:
    """Llama is trained to write bare calls, and clients must see large arguments grow."""
    model = write_tiny_model(tmp_path / "roomy", max_model_len=4096)
    gateway = await start_gateway(model=model, tool_call_parser="llama3_json")
    model_says(gateway, '{"name": "get_weather", "parameters": {"city": "Rome"}}')
    deltas = [delta["tool_calls"][0]["function"] for delta, _ in await chat_deltas(gateway) if "tool_calls" in delta]
    assert deltas[0] == {"name": "get_weather", "arguments": "{"} and len(deltas) > 8
    assert "".join(delta["arguments"] for delta in deltas) == '{"city": "Rome"}'
