"""Qwen2.5-Coder-0.5B makes a call with tool_choice auto, which three APIs return as a call, streamed and not."""

import json
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_serve import Serve

pytestmark = [pytest.mark.weights, pytest.mark.timeout(1800)]

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION = {"name": "get_weather", "description": "Get the current weather of a city", "parameters": SCHEMA}
ASKED = [{"role": "user", "content": "What is the weather in Paris?"}]
PARIS = {"city": "Paris"}


@pytest.fixture(scope="module")
def serve(qwen_dir: Path) -> Iterator[Serve]:
    with tempfile.TemporaryDirectory(prefix="ps-") as state:
        one = Serve(Path(state), "--model", str(qwen_dir), "--served-model-name", "qwen", "--max-model-len", "4096")
        try:
            one.wait_for_line("Ready after", 600)
            yield one
        finally:
            one.close()


def ask(serve: Serve, path: str, **fields: Any) -> Any:
    """Return the answer; of a stream, the list of its `data` values."""
    body = json.dumps({"model": "qwen", "temperature": 0, **fields}).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{serve.port}{path}", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as answer:
        if not fields.get("stream"):
            return json.load(answer)
        lines = [line[6:] for line in answer if line.startswith(b"data: ") and b"[DONE]" not in line]
        return [json.loads(line) for line in lines]


def test_chat_returns_the_call(serve: Serve) -> None:
    fields = {"messages": ASKED, "tools": [{"type": "function", "function": FUNCTION}], "max_tokens": 60}
    (choice,) = ask(serve, "/v1/chat/completions", **fields)["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("get_weather", PARIS)
    chunks = ask(serve, "/v1/chat/completions", stream=True, **fields)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    (streamed,) = (call for delta in deltas for call in delta.get("tool_calls", ()))
    assert streamed["function"] == call["function"] and not any(delta.get("content") for delta in deltas)


def test_responses_api_returns_the_call(serve: Serve) -> None:
    fields = {"input": ASKED, "tools": [{"type": "function", **FUNCTION, "strict": False}], "max_output_tokens": 60}
    (item,) = ask(serve, "/v1/responses", **fields)["output"]
    assert (item["type"], item["name"], json.loads(item["arguments"])) == ("function_call", "get_weather", PARIS)
    events = ask(serve, "/v1/responses", stream=True, **fields)
    assert [event["type"].removeprefix("response.") for event in events] == [
        "created", "in_progress", "output_item.added", "function_call_arguments.delta", "function_call_arguments.done",
        "output_item.done", "completed",
    ]  # fmt: skip


def test_messages_api_returns_the_call(serve: Serve) -> None:
    tool = {"name": "get_weather", "description": FUNCTION["description"], "input_schema": SCHEMA}
    fields = {"messages": ASKED, "tools": [tool], "max_tokens": 60}
    whole = ask(serve, "/v1/messages", **fields)
    (block,) = whole["content"]
    assert (whole["stop_reason"], block["type"], block["name"], block["input"]) == (
        "tool_use", "tool_use", "get_weather", PARIS,
    )  # fmt: skip
    events = ask(serve, "/v1/messages", stream=True, **fields)
    assert [event["type"] for event in events if event["type"] != "ping"] == [
        "message_start", "content_block_start", "content_block_delta", "content_block_stop", "message_delta",
        "message_stop",
    ]  # fmt: skip


def test_answer_without_a_call_stays_text(serve: Serve) -> None:
    """Without tools, or to a question that needs none, the answer is text."""
    (choice,) = ask(serve, "/v1/chat/completions", messages=ASKED, max_tokens=24)["choices"]
    assert "tool_calls" not in choice["message"] and choice["message"]["content"]
    hello = [{"role": "user", "content": "Hello, who are you?"}]
    tools = [{"type": "function", "function": FUNCTION}]
    (choice,) = ask(serve, "/v1/chat/completions", messages=hello, tools=tools, max_tokens=48)["choices"]
    assert choice["message"]["content"].startswith("Hello!") and choice["finish_reason"] == "stop"
