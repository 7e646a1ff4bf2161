"""Define the recorded requests by kind: streamed, collected, tools, logprobs, stored answers, errors."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from shared.messages import ErrorCode

TEXT = "It is é, in Paris."
CALL = '{"city": "Rome"}'
HI = [{"role": "user", "content": "Hi"}]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION = {"name": "get_weather", "description": "The weather of a city", "parameters": PARAMETERS}
CHAT_TOOL = {"type": "function", "function": FUNCTION}
RESPONSE_TOOL = {"type": "function", "strict": True, **FUNCTION}
MESSAGE_TOOL = {"name": "get_weather", "description": "The weather of a city", "input_schema": PARAMETERS}
USAGE = {"include_usage": True}
NAME = {"Idempotency-Key": "mine"}
SCORES = {"logprobs": True, "top_logprobs": 2}


@dataclass(frozen=True, kw_only=True)
class Call:
    """One HTTP request. `{id}` in the path stands for the id of the previous answer."""

    name: str
    path: str
    method: str = "POST"
    body: Mapping[str, Any] | bytes | None = None
    headers: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    says: str = TEXT
    fails: ErrorCode | None = None
    refusal: str = ""  # queue_full | store_unavailable: the store's reply


@dataclass(frozen=True, kw_only=True)
class Kind:
    path: str
    body: Mapping[str, Any]
    tools: Mapping[str, Any] | None = None
    logprobs: Mapping[str, Any] | None = None
    streams: bool = True
    is_kept: bool = True


KINDS = {
    "chat": Kind(
        path="/v1/chat/completions",
        body={"messages": HI},
        tools={"tools": [CHAT_TOOL], "tool_choice": {"type": "function", "function": {"name": "get_weather"}}},
        logprobs=SCORES,
    ),
    "completions": Kind(path="/v1/completions", body={"prompt": "Hi"}, logprobs={"logprobs": 2, "echo": True}),
    "responses": Kind(
        path="/v1/responses",
        body={"input": "Hi", "store": True},
        tools={"tools": [RESPONSE_TOOL], "tool_choice": {"type": "function", "name": "get_weather"}},
        logprobs={"include": ["message.output_text.logprobs"], "top_logprobs": 2},
    ),
    "messages": Kind(
        path="/v1/messages",
        body={"model": "tiny", "messages": HI, "max_tokens": 32},
        tools={"tools": [MESSAGE_TOOL], "tool_choice": {"type": "tool", "name": "get_weather"}},
    ),
    "compaction": Kind(path="/v1/responses/compact", body={"model": "tiny", "input": "Hi"}, streams=False),
}


def calls_of(kind: Kind) -> Sequence[Call]:
    """Return the calls of one kind, in the order in which they are made."""
    return [*_answers(kind), *_kept(kind), *_errors(kind)]


def _answers(kind: Kind) -> list[Call]:
    bodies: dict[str, tuple[Mapping[str, Any], str]] = {"plain": (kind.body, TEXT)}
    if kind.tools is not None:
        bodies["tools"] = {**kind.body, **kind.tools}, CALL
    if kind.logprobs is not None:
        bodies["logprobs"] = {**kind.body, **kind.logprobs}, TEXT
    if kind.path.endswith("completions"):
        bodies["two choices"] = {**kind.body, "n": 2}, TEXT
    calls = []
    for name, (body, says) in bodies.items():
        calls.append(Call(name=f"{name}, collected", path=kind.path, body=body, says=says))
        if kind.streams:
            streamed = {**body, "stream": True}
            if kind.path.endswith("completions"):
                streamed["stream_options"] = USAGE
            calls.append(Call(name=f"{name}, streamed", path=kind.path, body=streamed, says=says))
    return calls


def _kept(kind: Kind) -> list[Call]:
    collected = {**kind.body, "detach_seconds": 60}
    shown = "/v1/requests/{id}"
    resumed = {"Last-Event-ID": "3-0"}
    calls = [
        Call(name="kept, collected", path=kind.path, body=collected, headers=NAME),
        Call(name="kept, repeated", path=kind.path, body=collected, headers=NAME),
        Call(name="kept, another body of its name", path=kind.path, body={**collected, "seed": 7}, headers=NAME),
        Call(name="kept, shown", path=shown, method="GET"),
        Call(name="kept, its events", path=f"{shown}/events", method="GET"),
        Call(name="kept, its events after the third", path=f"{shown}/events", method="GET", headers=resumed),
        Call(name="kept, cancelled after its end", path=shown, method="DELETE"),
    ]
    if kind.streams:
        calls.append(Call(name="kept, streamed", path=kind.path, body={**collected, "stream": True}))
    if kind.path == "/v1/responses":
        calls += _stored_responses()
    return calls


def _stored_responses() -> list[Call]:
    path = "/v1/responses/{id}"
    return [
        Call(name="stored, shown", path=path, method="GET"),
        Call(name="stored, its events", path=f"{path}?stream=true&starting_after=2", method="GET"),
        Call(name="stored, its input", path=f"{path}/input_items", method="GET"),
        Call(name="stored, deleted", path=path, method="DELETE"),
        Call(name="stored, gone", path=path, method="GET"),
    ]


def _errors(kind: Kind) -> list[Call]:
    def failing(name: str, **changes: Any) -> Call:
        return Call(**{"name": f"error, {name}", "path": kind.path, "body": kind.body, **changes})

    calls = [
        failing("no JSON", body=b"{"),
        failing("no fields", body={}),
        failing("wrong type", body={**kind.body, "max_tokens": "x", "max_output_tokens": "x"}),
        failing("unknown model", body={**kind.body, "model": "nobody"}),
        failing("media type", headers={"Content-Type": "text/plain"}),
        failing("wrong method", method="PUT"),
        failing("wrong key", headers={"Authorization": "Bearer nobody"}),
        failing("queue full", refusal="queue_full"),
        failing("store unavailable", refusal="store_unavailable"),
        failing("request failed", fails=ErrorCode.REQUEST_FAILED),
        failing("deadline", fails=ErrorCode.DEADLINE_EXCEEDED),
    ]
    if kind.streams:
        streamed = {**kind.body, "stream": True}
        calls.append(failing("request failed, streamed", fails=ErrorCode.REQUEST_FAILED, body=streamed))
        calls.append(failing("deadline, streamed", fails=ErrorCode.DEADLINE_EXCEEDED, body=streamed))
    return calls
