"""Chunks of a stream: usage, the token that ends a sequence, and its logprobs."""

import json
from typing import Any

import pytest

from shared.messages import FinishReason, GenerationRequest, TokenEvent
from tests.gateway.conftest import IM_END, Gateway
from tests.gateway.fake_inference import finish, says
from tests.gateway.text.test_logprobs import says_scored

CONTINUOUS = {"include_usage": True, "continuous_usage_stats": True}
CHAT: tuple[str, dict[str, Any]] = ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]})
COMPLETION: tuple[str, dict[str, Any]] = ("/v1/completions", {"prompt": "hi"})


async def chunks_of(gateway: Gateway, asked: tuple[str, dict[str, Any]], **fields: Any) -> list[dict[str, Any]]:
    url, body = asked
    async with gateway.session.post(url, json={**body, "stream": True, **fields}) as response:
        assert response.status == 200, await response.text()
        events = (await response.text()).split("\n\n")
    data = [line for event in events for line in event.split("\n") if line.startswith("data: ")]
    assert data[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in data[:-1]]


def text_of(choice: dict[str, Any]) -> str:
    return choice["text"] if "text" in choice else choice["delta"].get("content", "")


@pytest.mark.parametrize("asked", [CHAT, COMPLETION])
@pytest.mark.parametrize("groups", [[[70], [71], [72]], [[70, 71, 72]], [[70, 71], [72]]])
@pytest.mark.parametrize("reason", [FinishReason.LENGTH, FinishReason.STOP])
async def test_every_chunk_of_a_choice_has_growing_usage(
    gateway: Gateway, asked: Any, groups: list[list[int]], reason: FinishReason
) -> None:
    ending = [[IM_END]] if reason is FinishReason.STOP else []
    gateway.engine.script = says(*groups, *ending, reason=reason)
    num_tokens = 3 + len(ending)
    chunks = await chunks_of(gateway, asked, stream_options=CONTINUOUS, max_tokens=num_tokens)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == [*([0] if asked is CHAT else []), *range(1, num_tokens + 1), num_tokens]
    assert all(chunk["usage"]["prompt_tokens"] == chunks[0]["usage"]["prompt_tokens"] for chunk in chunks)
    assert [bool(chunk["choices"]) for chunk in chunks] == [*[True] * (len(chunks) - 1), False]
    assert chunks[-2]["choices"][0]["finish_reason"] == reason.value
    plain = await chunks_of(gateway, asked, max_tokens=num_tokens)
    texts = ["".join(text_of(choice) for chunk in one for choice in chunk["choices"]) for one in (chunks, plain)]
    assert texts[0] == texts[1] and len(texts[0]) >= 3


@pytest.mark.parametrize("asked", [CHAT, COMPLETION])
async def test_chunks_of_choices_and_stop_strings_have_usage(gateway: Gateway, asked: Any) -> None:
    text = gateway.service.require_model().encoder.encode_text("abcd")
    gateway.engine.script = says(*([token_id] for token_id in text), reason=FinishReason.LENGTH)
    chunks = await chunks_of(gateway, asked, stream_options=CONTINUOUS, max_tokens=4, n=2)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] == 8
    chunks = await chunks_of(gateway, asked, stream_options=CONTINUOUS, max_tokens=4, stop="c")
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks if chunk["choices"]]
    assert len(set(counts)) == len(counts)
    assert "".join(text_of(choice) for chunk in chunks for choice in chunk["choices"]) == "ab"


@pytest.mark.parametrize("asked", [CHAT, COMPLETION])
async def test_only_the_last_possible_token_waits_for_its_end(gateway: Gateway, asked: Any) -> None:
    """Send every other token at once, however late the next one arrives."""
    url, body = asked
    asked_for = {"stream": True, "stream_options": CONTINUOUS, "max_tokens": 2}
    async with gateway.session.post(url, json={**body, **asked_for}) as response:
        stream = await gateway.engine.next_stream()
        stream.send(TokenEvent(stream.request.request_id, 0, [70]))
        events = b""
        while b'"d"' not in events:
            events += await response.content.readuntil(b"\n\n")
        stream.send(TokenEvent(stream.request.request_id, 1, [71]))
        stream.send(finish(stream.request, 2, FinishReason.LENGTH))
        events += await response.content.read()
    chunks = [json.loads(event[6:]) for event in events.decode().split("\n\n") if event.startswith("data: {")]
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == [*([0] if asked is CHAT else []), 1, 2, 2]
    choice = chunks[-2]["choices"][0]
    assert (text_of(choice), choice["finish_reason"]) == ("e", "length")


async def test_tokens_before_a_failure_are_delivered(gateway: Gateway) -> None:
    def script(request: GenerationRequest) -> Any:
        yield TokenEvent(request.request_id, 0, [70, 71])
        yield finish(request, 2, FinishReason.CANCELLED)

    gateway.engine.script = script
    chunks = await chunks_of(gateway, COMPLETION, stream_options=CONTINUOUS, max_tokens=2)
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks[:-1]] == [1, 2]
    assert chunks[-1]["error"]["code"] == "request_cancelled"


@pytest.mark.parametrize("asked", [CHAT, COMPLETION])
async def test_end_token_has_no_chunk_of_its_own(gateway: Gateway, asked: Any) -> None:
    gateway.engine.script = says([70], [71], [IM_END])
    chunks = await chunks_of(gateway, asked, stream_options={"include_usage": True})
    choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
    expected = [None, None, "stop"] if asked is COMPLETION else [None, None, None, "stop"]
    assert [choice["finish_reason"] for choice in choices] == expected
    assert all(text_of(choice) for choice in choices if choice["finish_reason"] is None and "role" not in str(choice))
    assert chunks[-1]["usage"]["completion_tokens"] == 3


async def test_end_token_id_and_logprob_are_in_the_last_chunk(gateway: Gateway) -> None:
    gateway.engine.script = says_scored([70, 71, IM_END], reason=FinishReason.STOP)
    fields = {"logprobs": 1, "return_token_ids": True}
    chunks = await chunks_of(gateway, COMPLETION, **fields)
    last = chunks[-1]["choices"][0]
    assert (last["text"], last["finish_reason"], last["token_ids"]) == ("", "stop", [IM_END])
    assert last["logprobs"]["token_logprobs"] == [-IM_END / 1024]
    url, body = COMPLETION
    async with gateway.session.post(url, json={**body, **fields}) as response:
        (whole,) = (await response.json())["choices"]
    assert whole["token_ids"] == [token_id for chunk in chunks for token_id in chunk["choices"][0]["token_ids"]]
    assert whole["logprobs"]["tokens"][-1] == "<|im_end|>" and len(whole["logprobs"]["tokens"]) == 3
    assert whole["logprobs"]["text_offset"][-1] == len(whole["text"])
    streamed = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    for field, values in whole["logprobs"].items():
        assert [value for logprobs in streamed for value in logprobs[field]] == values


async def test_non_ending_stop_token_is_sent_with_the_next_one(gateway: Gateway) -> None:
    gateway.engine.script = says_scored([70, IM_END, 71], reason=FinishReason.LENGTH)
    chunks = await chunks_of(gateway, COMPLETION, logprobs=0, return_token_ids=True, skip_special_tokens=False)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [choice["token_ids"] for choice in choices] == [[70], [IM_END, 71], []]
    assert [len(choice["logprobs"]["tokens"]) for choice in choices[:2]] == [1, 2]
    assert choices[1]["text"].startswith("<|im_end|>")
