"""Bodies, chunks and events are valid by OpenAI's document; responses by the Open Responses specification.

tests/spec has the documents. Fields beyond them, and those that are null here, are listed below.
"""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from shared.messages import ErrorCode, ErrorEvent, FinishReason, TokenEvent
from tests.gateway.conftest import Gateway
from tests.gateway.fake_inference import FakeInferenceClient, says
from tests.gateway.responses import WEATHER, model_says
from tests.gateway.text.test_logprobs import says_scored
from tests.spec.validation import Description
from tests.tiny_model import write_tiny_model

TIMES = ("in_progress_at", "expires_at", "finalizing_at", "completed_at", "failed_at", "expired_at", "cancelling_at",
         "cancelled_at")  # fmt: skip
PROMPT_FIELDS = {"prompt_logprobs": {"type": "null"}, "prompt_token_ids": {"type": "null"}}
REASONING = {"reasoning": {"type": "string"}, "reasoning_content": {"type": "string"}}
OPENAI = Description(
    "openai-2.3.0",
    more={
        # Of vLLM and DeepSeek, for separate reasoning.
        "ChatCompletionResponseMessage": REASONING,
        "ChatCompletionStreamResponseDelta": REASONING,
        # Of Open Responses, and of OpenAI's server.
        "Response": {
            "store": {"type": "boolean"},
            "presence_penalty": {"type": "number"},
            "frequency_penalty": {"type": "number"},
        },
        "ResponseUsage": {  # of later types of OpenAI's client, which requires it
            "input_tokens_details": {
                "type": "object",
                "required": ["cached_tokens", "cache_write_tokens"],
                "properties": {"cached_tokens": {"type": "integer"}, "cache_write_tokens": {"type": "integer"}},
                "additionalProperties": False,
            }
        },
        # Of vLLM.
        "CreateChatCompletionResponse": PROMPT_FIELDS,
        "CreateCompletionResponse.choices": PROMPT_FIELDS,
        "Model": {"root": {"type": "string"}, "parent": {"type": "null"}, "max_model_len": {"type": "integer"}},
    },
    nullable={  # OpenAI's server sends null there too
        "Response": ("user", "safety_identifier", "prompt_cache_key", "usage"),
        "CreateChatCompletionStreamResponse": ("usage",),
        "Batch": ("errors", "output_file_id", "error_file_id", *TIMES),
        "OpenAIFile": ("expires_at", "status_details"),
    },
)
OPEN_RESPONSES = Description(
    "open-responses-2026-04-24",
    more={
        "ResponseResource": {"user": {"type": ["string", "null"]}},
        # Of OpenAI's document.
        "ResponseFunctionCallArgumentsDoneStreamingEvent": {"name": {"type": "string"}},
        "ReasoningBody": {"status": {"enum": ["in_progress", "completed", "incomplete"]}},
    },
)
# Schemas are named after OpenAI's events. Reasoning has its own names there: response.reasoning.delta.
OPEN_NAMES = {
    "response.created": "ResponseCreated", "response.in_progress": "ResponseInProgress",
    "response.completed": "ResponseCompleted", "response.incomplete": "ResponseIncomplete",
    "response.failed": "ResponseFailed", "response.output_item.added": "ResponseOutputItemAdded",
    "response.output_item.done": "ResponseOutputItemDone", "response.content_part.added": "ResponseContentPartAdded",
    "response.content_part.done": "ResponseContentPartDone", "response.output_text.delta": "ResponseOutputTextDelta",
    "response.output_text.done": "ResponseOutputTextDone",
    "response.function_call_arguments.delta": "ResponseFunctionCallArgumentsDelta",
    "response.function_call_arguments.done": "ResponseFunctionCallArgumentsDone",
}  # fmt: skip

HI: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
TOOL = {"type": "function", "function": {"name": "get_weather"}}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
USAGE = {"include_usage": True, "continuous_usage_stats": True}


@pytest.fixture
async def gateway(start_gateway: Callable[..., Any], tmp_path: Path) -> Gateway:
    model = write_tiny_model(tmp_path / "roomy", max_model_len=4096)
    gateway: Gateway = await start_gateway(
        FakeInferenceClient(), model=model, reasoning_parser="qwen3", files_dir=tmp_path / "kept"
    )
    return gateway


async def said(gateway: Gateway, url: str, body: Any = None, *, method: str = "POST", status: int = 200) -> Any:
    async with gateway.session.request(method, url, json=body) as reply:
        assert reply.status == status, await reply.text()
        return await reply.json()


async def events(gateway: Gateway, url: str, body: dict[str, Any]) -> list[Any]:
    async with gateway.session.post(url, json={**body, "stream": True}) as reply:
        assert reply.status == 200, await reply.text()
        lines = (await reply.text()).splitlines()
    return [json.loads(line[6:]) for line in lines if line.startswith("data: ") and line != "data: [DONE]"]


CHATS: list[tuple[str, dict[str, Any]]] = [
    ("It is é.", {}),
    ("<think>hm</think>Yes.", {"n": 2}),
    (f"<think>hm</think>I look.{CALL}{CALL}", {"tools": [TOOL]}),
    (CALL, {"tools": [TOOL], "response_format": {"type": "json_object"}}),
    ('{"city": "Rome"}', {"tools": [TOOL], "tool_choice": TOOL}),
    ("", {"max_tokens": 3}),
]


@pytest.mark.parametrize("reason", [FinishReason.STOP, FinishReason.LENGTH])
async def test_chat_bodies_and_chunks_are_valid(gateway: Gateway, reason: FinishReason) -> None:
    for text, fields in CHATS:
        model_says(gateway, text, reason)
        OPENAI.check("CreateChatCompletionResponse", await said(gateway, "/v1/chat/completions", {**HI, **fields}))
        for options in ({}, {"stream_options": USAGE}, {"stream_options": {"include_usage": True}}):
            for chunk in await events(gateway, "/v1/chat/completions", {**HI, **fields, **options}):
                OPENAI.check("CreateChatCompletionStreamResponse", chunk)


async def test_logprobs_are_valid(gateway: Gateway) -> None:
    encoder = gateway.service.require_model().encoder
    gateway.engine.script = says_scored(encoder.encode_text("It is é."), group=2)
    chat = {**HI, "logprobs": True, "top_logprobs": 2}
    OPENAI.check("CreateChatCompletionResponse", await said(gateway, "/v1/chat/completions", chat))
    for chunk in await events(gateway, "/v1/chat/completions", chat):
        OPENAI.check("CreateChatCompletionStreamResponse", chunk)
    asked = {"input": "hi", "top_logprobs": 2, "include": ["message.output_text.logprobs"]}
    OPENAI.check("Response", await said(gateway, "/v1/responses", asked))
    for event in await events(gateway, "/v1/responses", asked):
        OPENAI.check("ResponseStreamEvent", event)
    text = {"prompt": ["a", "b"], "logprobs": 2}
    OPENAI.check("CreateCompletionResponse", await said(gateway, "/v1/completions", text))
    check_completion_chunks(await events(gateway, "/v1/completions", {**text, "stream_options": USAGE}))


def check_completion_chunks(chunks: list[Any]) -> None:
    """Validate a chunk against the schema of whole bodies, except for a null finish_reason.

    The document has one schema for both, in which finish_reason is never null. OpenAI's server sends null until the
    last chunk.
    """
    for chunk in chunks:
        for choice in chunk["choices"]:
            choice["finish_reason"] = choice["finish_reason"] or "stop"
        if chunk.get("usage", 0) is None:
            del chunk["usage"]
        OPENAI.check("CreateCompletionResponse", chunk)


async def test_completion_bodies_and_chunks_are_valid(gateway: Gateway) -> None:
    for text, fields in (("It is", {}), ("It", {"echo": True, "n": 2}), ("", {"prompt": ["a", "b"], "max_tokens": 1})):
        model_says(gateway, text)
        body = {"prompt": "hi", **fields}
        OPENAI.check("CreateCompletionResponse", await said(gateway, "/v1/completions", body))
        for options in ({}, {"stream_options": USAGE}, {"stream_options": {"include_usage": True}}):
            check_completion_chunks(await events(gateway, "/v1/completions", {**body, **options}))


TOWN = {"type": "json_schema", "schema": {"type": "object", "properties": {}}}
RESPONSES: list[tuple[str, dict[str, Any]]] = [
    ("It is é.", {}),
    ("<think>hm</think>Yes.", {"instructions": "be", "reasoning": {"effort": "low"}, "metadata": {"a": "b"}}),
    (f"One.{CALL}Two.{CALL}", {"tools": [WEATHER, {"type": "function", "name": "f"}], "user": "u"}),
    ("{}", {"text": {"format": TOWN}, "tools": [WEATHER]}),
    ("{}", {"text": {"format": {"type": "json_object"}, "verbosity": "medium"}, "store": False}),
    ('{"city": "Rome"}', {"tools": [WEATHER], "tool_choice": {"type": "function", "name": "get_weather"}}),
    ("x", {"tools": [WEATHER], "tool_choice": {"type": "allowed_tools", "tools": [
        {"type": "function", "name": "get_weather"}]}}),
    ("", {"temperature": 0, "top_p": 0.5, "max_output_tokens": 9, "presence_penalty": 1, "truncation": "disabled"}),
]  # fmt: skip


@pytest.mark.parametrize("reason", [FinishReason.STOP, FinishReason.LENGTH])
async def test_response_bodies_and_events_are_valid(gateway: Gateway, reason: FinishReason) -> None:
    kinds = set()
    for text, fields in RESPONSES:
        model_says(gateway, text, reason)
        body = {"input": "hi", **fields}
        check_response(await said(gateway, "/v1/responses", body))
        for event in await events(gateway, "/v1/responses", body):
            kinds.add(event["type"])
            check_event(event)
    ended = "response.completed" if reason is FinishReason.STOP else "response.incomplete"
    names = {*OPEN_NAMES} - {"response.completed", "response.incomplete", "response.failed"}
    assert kinds == {*names, ended, "response.reasoning_text.delta", "response.reasoning_text.done"}


def check_response(response: Any) -> None:
    OPENAI.check("Response", response)
    OPEN_RESPONSES.check("ResponseResource", response)


def check_event(event: Any) -> None:
    OPENAI.check("ResponseStreamEvent", event)
    if event["type"] in OPEN_NAMES:
        OPEN_RESPONSES.check(f"{OPEN_NAMES[event['type']]}StreamingEvent", event)


async def test_failed_and_waiting_responses_are_valid(gateway: Gateway) -> None:
    def breaks(request: Any) -> Any:
        yield TokenEvent(request.request_id, 0, [70])
        yield ErrorEvent(request.request_id, ErrorCode.REQUEST_FAILED, "")

    gateway.engine.script = breaks
    *_, last = await events(gateway, "/v1/responses", {"input": "hi"})
    assert last["type"] == "response.failed"
    check_event(last)
    model_says(gateway, "later")
    check_response(await said(gateway, "/v1/responses", {"input": "hi", "background": True}))


async def test_counts_and_compactions_are_valid(gateway: Gateway) -> None:
    counted = await said(gateway, "/v1/responses/input_tokens", {"input": "hi"})
    OPENAI.check("TokenCountsResource", counted)
    model_says(gateway, "Short.")
    for given in ("hi", [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]):
        compacted = await said(gateway, "/v1/responses/compact", {"input": given})
        OPENAI.check("CompactResource", compacted)
        OPEN_RESPONSES.check("CompactResource", compacted)


async def test_models_files_and_batches_are_valid(gateway: Gateway) -> None:
    models = await said(gateway, "/v1/models", method="GET")
    OPENAI.check("ListModelsResponse", models)
    OPENAI.check("Model", await said(gateway, f"/v1/models/{models['data'][0]['id']}", method="GET"))
    gateway.engine.script = says([5, 6])
    one = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "hi"}}
    for content in (json.dumps(one), json.dumps({**one, "body": {"prompt": 3}})):
        form = aiohttp.FormData({"purpose": "batch"})
        form.add_field("file", content.encode() + b"\n", filename="lines.jsonl")
        async with gateway.session.post("/v1/files", data=form) as reply:
            file = await reply.json()
        OPENAI.check("OpenAIFile", file)
        fields = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
        batch = await said(gateway, "/v1/batches", fields)
        OPENAI.check("Batch", batch)
        async with asyncio.timeout(60):
            while batch["status"] not in ("completed", "failed", "cancelled"):
                await asyncio.sleep(0.02)
                batch = await said(gateway, f"/v1/batches/{batch['id']}", method="GET")
                OPENAI.check("Batch", batch)
        OPENAI.check("OpenAIFile", await said(gateway, f"/v1/files/{file['id']}", method="GET"))
    OPENAI.check("ListBatchesResponse", await said(gateway, "/v1/batches", method="GET"))
    OPENAI.check("ListFilesResponse", await said(gateway, "/v1/files", method="GET"))
    OPENAI.check("DeleteFileResponse", await said(gateway, f"/v1/files/{file['id']}", method="DELETE"))
    OPENAI.check("ListFilesResponse", await said(gateway, "/v1/files?limit=1", method="GET"))


async def test_error_bodies_are_valid(gateway: Gateway) -> None:
    wrong: list[tuple[str, str, Any, int]] = [
        ("POST", "/v1/chat/completions", {}, 400), ("POST", "/v1/responses", {"input": 3}, 400),
        ("POST", "/v1/completions", {"prompt": "a", "model": "other"}, 404), ("GET", "/v1/files/x", None, 404),
        ("GET", "/nowhere", None, 404), ("GET", "/v1/responses", None, 405), ("GET", "/v1/batches/x", None, 404),
        ("GET", "/v1/responses/resp_1", None, 404), ("POST", "/v1/batches", {}, 400),
    ]  # fmt: skip
    for method, url, body, status in wrong:
        OPENAI.check("ErrorResponse", await said(gateway, url, body, method=method, status=status))


@pytest.mark.parametrize(
    ("schema", "data"),
    [
        ("Model", {"id": "a", "object": "model", "created": 1}),
        ("Model", {"id": "a", "object": "model", "created": "1", "owned_by": "b"}),
        ("Model", {"id": "a", "object": "thing", "created": 1, "owned_by": "b"}),
        ("Model", {"id": "a", "object": "model", "created": 1, "owned_by": "b", "x": 1}),
        ("TokenCountsResource", {"object": "response.input_tokens", "input_tokens": None}),
    ],
)
def test_undocumented_field_is_detected(schema: str, data: Any) -> None:
    with pytest.raises(AssertionError):
        OPENAI.check(schema, data)
