"""Echo, prompt logprobs and token ids, streamed and whole; truncation and priority of prompts."""

from typing import Any

import openai
import pytest

from gateway.pipeline.answer_extras import prompt_entries
from gateway.text.served_model import ServedModel
from shared.messages import FinishReason, GenerationRequest, PromptLogprobs, TokenEvent, TokenLogprobs, encoded_logprobs
from tests.gateway.conftest import IM_END, Gateway
from tests.gateway.fake_inference import Script, finish, says
from tests.gateway.text.test_logprobs import scored

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}


def ids(model: ServedModel, text: str) -> list[int]:
    return model.encoder.encode_text(text)


def scores_prompt_and_says(token_ids: list[int], reason: FinishReason = FinishReason.LENGTH) -> Script:
    def script(request: GenerationRequest) -> Any:
        prompt = request.prompt_token_ids
        half = (len(prompt) + 1) // 2
        for start, stop in ((1, half), (half, len(prompt))):
            part = PromptLogprobs(start, [scored(token_id) for token_id in prompt[start:stop]])
            yield TokenEvent(request.request_id, 0, [], prompt_logprobs=part)
        for index, token_id in enumerate(token_ids):
            yield TokenEvent(request.request_id, index, [token_id], logprobs=[scored(token_id)])
        yield finish(request, len(token_ids), reason)

    return script


async def ask(gateway: Gateway, url: str = "/v1/completions", **body: Any) -> Any:
    async with gateway.session.post(url, json=body) as response:
        assert response.status == 200, await response.text()
        return await response.json()


async def test_echo_with_logprobs_has_the_sums_of_lm_eval(gateway: Gateway, tiny_model: ServedModel) -> None:
    """Compute lm-eval's sums: the first prompt token has no logprob, and the last entry belongs to the answer."""
    prompts, answer = [ids(tiny_model, "It's é."), ids(tiny_model, "the end")], ids(tiny_model, "!")
    gateway.engine.script = scores_prompt_and_says(answer)
    found = await ask(gateway, prompt=prompts, max_tokens=1, logprobs=1, echo=True, temperature=0)
    assert gateway.engine.requests[0].sampling.prompt_logprobs == 1
    for choice, prompt in zip(found["choices"], prompts, strict=True):
        logprobs = choice["logprobs"]
        assert logprobs["token_logprobs"] == [None, *(-token_id / 1024 for token_id in [*prompt[1:], *answer])]
        assert logprobs["top_logprobs"][0] is None
        assert [max(top.values()) for top in logprobs["top_logprobs"][1:]] == logprobs["token_logprobs"][1:]
        assert [choice["text"][offset] for offset in logprobs["text_offset"]][-1] == "!"
        assert len(logprobs["tokens"]) == len(prompt) + 1
    assert [choice["text"] for choice in found["choices"]] == ["It's é.!", "the end!"]


async def test_end_token_of_echo_is_scored(gateway: Gateway, tiny_model: ServedModel) -> None:
    """Without it, evaluations that drop the last entry would drop one of the prompt."""
    prompt = ids(tiny_model, "the end")
    gateway.engine.script = scores_prompt_and_says([IM_END], FinishReason.STOP)
    (choice,) = (await ask(gateway, prompt=prompt, max_tokens=1, logprobs=1, echo=True))["choices"]
    assert choice["text"] == "the end" and choice["finish_reason"] == "stop"
    assert choice["logprobs"]["token_logprobs"][-1] == -IM_END / 1024
    assert len(choice["logprobs"]["token_logprobs"]) == len(prompt) + 1


async def test_echo_with_max_tokens_0_has_the_prompt_only(gateway: Gateway, tiny_model: ServedModel) -> None:
    prompt = ids(tiny_model, "the end")
    gateway.engine.script = scores_prompt_and_says(ids(tiny_model, "!"))
    found = await ask(gateway, prompt=prompt, max_tokens=0, logprobs=0, echo=True)
    (choice,) = found["choices"]
    assert choice["text"] == "the end" and choice["finish_reason"] == "length"
    assert len(choice["logprobs"]["token_logprobs"]) == len(prompt)
    assert found["usage"]["completion_tokens"] == 0 and gateway.engine.requests[0].sampling.max_tokens == 1


async def test_echo_streamed_equals_whole(
    openai_client: openai.AsyncOpenAI, gateway: Gateway, tiny_model: ServedModel
) -> None:
    gateway.engine.script = scores_prompt_and_says(ids(tiny_model, " a é"))
    asked: Any = {"model": "tiny", "prompt": "the é", "echo": True, "logprobs": 2, "max_tokens": 9}
    whole = (await openai_client.completions.create(**asked)).choices[0]
    parts = [chunk.choices[0] async for chunk in await openai_client.completions.create(**asked, stream=True)]
    assert "".join(part.text for part in parts) == whole.text == "the é a é"
    for field in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        streamed = [item for part in parts if part.logprobs for item in getattr(part.logprobs, field)]
        assert streamed == getattr(whole.logprobs, field)


async def test_prompt_logprobs_have_the_shape_of_vllm(gateway: Gateway, tiny_model: ServedModel) -> None:
    prompt = ids(tiny_model, "the end")
    gateway.engine.script = scores_prompt_and_says(ids(tiny_model, "!"))
    (choice,) = (await ask(gateway, prompt=prompt, prompt_logprobs=2))["choices"]
    first, second = choice["prompt_logprobs"][:2]
    assert first is None and choice["logprobs"] is None and choice["text"] == "!"
    assert second == {
        str(prompt[1]): {"logprob": -prompt[1] / 1024, "rank": 1, "decoded_token": " end"},
        str(prompt[1] + 1): {"logprob": -5.5, "rank": 2, "decoded_token": " assistant"},
    }
    chat = await ask(gateway, "/v1/chat/completions", **CHAT, prompt_logprobs=0)
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]
    assert "prompt_logprobs" not in chat["choices"][0]


async def test_token_ids_are_returned(gateway: Gateway, tiny_model: ServedModel) -> None:
    answer = ids(tiny_model, "é so")
    gateway.engine.script = says(*[[token_id] for token_id in [*answer, IM_END]])
    (choice,) = (await ask(gateway, prompt=[5, 6], return_token_ids=True, n=1))["choices"]
    assert (choice["prompt_token_ids"], choice["token_ids"]) == ([5, 6], [*answer, IM_END])
    chat = await ask(gateway, "/v1/chat/completions", **CHAT, return_token_ids=True)
    assert chat["prompt_token_ids"] == gateway.engine.requests[-1].prompt_token_ids
    assert chat["choices"][0]["token_ids"] == [*answer, IM_END]
    assert "token_ids" not in (await ask(gateway, prompt=[5, 6]))["choices"][0]


async def test_token_ids_are_streamed(
    openai_client: openai.AsyncOpenAI, gateway: Gateway, tiny_model: ServedModel
) -> None:
    answer = ids(tiny_model, "é so")
    gateway.engine.script = says(*[[token_id] for token_id in answer], reason=FinishReason.LENGTH)
    asked: Any = {"model": "tiny", "stream": True, "extra_body": {"return_token_ids": True}}
    chunks = [chunk async for chunk in await openai_client.completions.create(prompt=[5, 6], **asked)]
    token_ids = [token_id for chunk in chunks for token_id in getattr(chunk.choices[0], "token_ids", None) or []]
    assert token_ids == answer and chunks[0].choices[0].prompt_token_ids == [5, 6]
    chat = [chunk async for chunk in await openai_client.chat.completions.create(**CHAT, **asked)]
    assert chat[0].prompt_token_ids == gateway.engine.requests[-1].prompt_token_ids
    assert [id_ for chunk in chat for id_ in getattr(chunk.choices[0], "token_ids", None) or []] == answer


@pytest.mark.parametrize(("truncate", "expected"), [(2, [8, 9]), (99, list(range(5, 10))), (-1, list(range(5, 10)))])
async def test_prompt_with_truncation_loses_its_beginning(gateway: Gateway, truncate: int, expected: list[int]) -> None:
    gateway.engine.script = says([5])
    await ask(gateway, prompt=list(range(5, 10)), truncate_prompt_tokens=truncate)
    assert gateway.engine.requests[0].prompt_token_ids == expected


@pytest.mark.parametrize(
    ("side", "truncate", "expected"), [("right", 2, [5, 6]), ("right", -1, list(range(5, 10))), ("left", 2, [8, 9])]
)
async def test_truncation_side_is_set_by_the_request(
    gateway: Gateway, side: str, truncate: int, expected: list[int]
) -> None:
    gateway.engine.script = says([5])
    await ask(gateway, prompt=list(range(5, 10)), truncate_prompt_tokens=truncate, truncation_side=side)
    assert gateway.engine.requests[0].prompt_token_ids == expected


async def test_truncated_prompt_may_exceed_the_context(gateway: Gateway) -> None:
    gateway.engine.script = says([5])
    await ask(gateway, prompt="word " * 2000, truncate_prompt_tokens=-1, max_tokens=56)
    assert len(gateway.engine.requests[0].prompt_token_ids) == 200


@pytest.mark.parametrize(
    ("body", "headers", "expected"),
    [
        ({}, {}, "interactive"),
        ({"priority": -5}, {}, "interactive"),
        ({"priority": 3}, {}, "batch"),
        ({}, {"x-priority": "batch"}, "batch"),
        ({"priority": 3}, {"x-priority": "interactive"}, "interactive"),
    ],
)
async def test_priority_numbers_map_to_classes(
    gateway: Gateway, body: dict[str, Any], headers: dict[str, str], expected: str
) -> None:
    gateway.engine.script = says([5])
    async with gateway.session.post("/v1/completions", json={"prompt": "a", **body}, headers=headers) as response:
        assert response.status == 200
    assert gateway.engine.requests[0].priority_class == expected


async def test_unknown_priority_is_refused(gateway: Gateway) -> None:
    async with gateway.session.post("/v1/completions", json={"prompt": "a"}, headers={"x-priority": "vip"}) as response:
        assert response.status == 400 and (await response.json())["error"]["param"] == "x-priority"


def test_prompt_entries_have_the_offsets_of_their_text(tiny_model: ServedModel) -> None:
    token_ids = ids(tiny_model, "a é b")
    score = encoded_logprobs(TokenLogprobs(-1.0, (), ()))
    spellings = tiny_model.encoder.spellings(by_id=False)
    scores = {index: score for index in range(1, len(token_ids))}
    entries = list(prompt_entries(tiny_model.encoder, spellings, token_ids, scores))
    assert [entry.text_offset for entry in entries] == [0, 1, 2, 2, 3, 4]
    assert [entry.scores for entry in entries] == [None] + [score] * 5
