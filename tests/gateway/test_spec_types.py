"""Every field of every chunk and body is in the types of OpenAI's client, and there are no others."""

import json
from collections.abc import Iterator
from typing import Any

import pydantic
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from gateway.text.served_model import ServedModel
from tests.gateway.conftest import Gateway
from tests.gateway.text.test_logprobs import says_scored

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "logprobs": True, "top_logprobs": 2}
TEXT: dict[str, Any] = {"prompt": ["a", "b"], "logprobs": 2, "n": 1}
ROUTES = [
    ("/v1/chat/completions", CHAT, ChatCompletion, ChatCompletionChunk),
    ("/v1/completions", TEXT, Completion, Completion),
]


OF_VLLM = {"prompt_logprobs", "prompt_token_ids"}  # null in an answer that is not streamed


def unknown_fields(value: Any, path: str = "") -> Iterator[str]:
    """Return the fields that the client's types do not declare; the client accepts and separates them."""
    if isinstance(value, pydantic.BaseModel):
        yield from (f"{path}.{name}" for name in (value.model_extra or {}).keys() - OF_VLLM)
        for name in type(value).model_fields:
            yield from unknown_fields(getattr(value, name), f"{path}.{name}")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from unknown_fields(item, f"{path}[{index}]")


def checked(kind: type[pydantic.BaseModel], data: Any) -> Any:
    if kind is Completion:  # the client's type has no null finish_reason; OpenAI's chunks before the last one do
        choices = [{**choice, "finish_reason": choice["finish_reason"] or "stop"} for choice in data["choices"]]
        data = {**data, "choices": choices}
    value = kind.model_validate(data, strict=True)
    assert list(unknown_fields(value)) == []
    missing = [name for name, field in kind.model_fields.items() if field.is_required() and name not in data]
    assert missing == []
    return value


async def chunks_of(gateway: Gateway, url: str, body: dict[str, Any]) -> list[Any]:
    async with gateway.session.post(url, json={**body, "stream": True}) as response:
        assert response.status == 200, await response.text()
        *events, done = [block for block in (await response.text()).split("\n\n") if block]
    assert done == "data: [DONE]"
    return [json.loads(event.removeprefix("data: ")) for event in events]


@pytest.mark.parametrize(("url", "body", "whole", "chunk"), ROUTES)
async def test_all_fields_are_in_the_types_of_the_client(
    gateway: Gateway, tiny_model: ServedModel, url: str, body: dict[str, Any], whole: Any, chunk: Any
) -> None:
    gateway.engine.script = says_scored(tiny_model.encoder.encode_text("It is é."), group=2)
    async with gateway.session.post(url, json=body) as response:
        answer = checked(whole, await response.json())
    with_usage = await chunks_of(gateway, url, {**body, "stream_options": {"include_usage": True}})
    for data in (*await chunks_of(gateway, url, body), *with_usage):
        checked(chunk, data)
    assert len({(data["id"], data["created"], data["model"], data["object"]) for data in with_usage}) == 1
    *others, last = with_usage
    assert all(data["usage"] is None for data in others) and last["choices"] == []
    # The joined stream equals the whole: text, logprobs, finish reasons and usage.
    assert {**last["usage"]} == answer.usage.model_dump(exclude_none=True)
    for choice in answer.choices:
        parts = [part for data in others for part in data["choices"] if part["index"] == choice.index]
        assert [part["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + [choice.finish_reason]
        logprobs = [part["logprobs"] for part in parts if part["logprobs"]]
        if whole is ChatCompletion:
            assert "".join(part["delta"].get("content", "") for part in parts) == choice.message.content
            joined = [entry for part in logprobs for entry in part["content"]]
            assert joined == [entry.model_dump() for entry in choice.logprobs.content]
        else:
            assert "".join(part["text"] for part in parts) == choice.text
            for field in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
                assert [item for part in logprobs for item in part[field]] == getattr(choice.logprobs, field)
