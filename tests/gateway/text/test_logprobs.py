"""Logprobs from the engine's events in OpenAI's shapes, read by the official client."""

import json
import math
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from gateway.text.logprobs import LogprobEntry, chat_logprobs, completion_logprobs
from gateway.text.served_model import ServedModel
from gateway.text.token_spellings import TokenBytes, TokenSpellings
from shared.messages import (
    EncodedLogprobs,
    FinishReason,
    GenerationRequest,
    PromptLogprobs,
    StreamEvent,
    TokenEvent,
    TokenLogprobs,
    encoded_logprobs,
)
from tests.gateway.conftest import IM_END, Gateway
from tests.gateway.fake_inference import Script, finish

HI: Any = [{"role": "user", "content": "hi"}]


def scored(token_id: int) -> EncodedLogprobs:
    """Score the token itself and the next id."""
    return encoded_logprobs(TokenLogprobs(-token_id / 1024, (token_id, token_id + 1), (-token_id / 1024, -5.5)))


def says_scored(token_ids: list[int], group: int = 1, reason: FinishReason = FinishReason.LENGTH) -> Script:
    """Return a script with `group` scored tokens per event."""

    def script(request: GenerationRequest) -> Any:
        for start in range(0, len(token_ids), group):
            tokens = token_ids[start : start + group]
            yield TokenEvent(request.request_id, start, tokens, logprobs=[scored(token_id) for token_id in tokens])
        yield finish(request, len(token_ids), reason)

    return script


@pytest.fixture
async def client(gateway: Gateway) -> AsyncIterator[openai.AsyncOpenAI]:
    url = f"{gateway.session._base_url}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as opened:
        yield opened


@pytest.mark.parametrize("group", [1, 3])
async def test_chat_logprobs_have_tokens_and_alternatives(
    client: openai.AsyncOpenAI, gateway: Gateway, tiny_model: ServedModel, group: int
) -> None:
    token_ids = tiny_model.encoder.encode_text("It's é.")
    gateway.engine.script = says_scored(token_ids, group)
    answer = await client.chat.completions.create(
        model="tiny", messages=HI, logprobs=True, top_logprobs=2, max_tokens=20
    )
    assert gateway.engine.requests[0].sampling.logprobs == 2
    (choice,) = answer.choices
    assert choice.message.content == "It's é."
    assert choice.logprobs is not None and choice.logprobs.content is not None
    content = choice.logprobs.content
    assert b"".join(bytes(entry.bytes or []) for entry in content) == "It's é.".encode()
    assert [entry.logprob for entry in content] == [-token_id / 1024 for token_id in token_ids]
    assert [len(entry.top_logprobs) for entry in content] == [2] * len(token_ids)
    assert (content[0].top_logprobs[0].token, content[0].top_logprobs[1].logprob) == (content[0].token, -5.5)
    openai.types.chat.ChatCompletion.model_validate(answer.model_dump(), strict=True)


async def test_chunk_logprobs_together_equal_the_whole(
    client: openai.AsyncOpenAI, gateway: Gateway, tiny_model: ServedModel
) -> None:
    gateway.engine.script = says_scored(tiny_model.encoder.encode_text("It is é, \u2028 so."), group=2)
    asked: Any = {"model": "tiny", "messages": HI, "logprobs": True, "top_logprobs": 1}
    whole = (await client.chat.completions.create(**asked)).choices[0].logprobs
    chunks = [chunk async for chunk in await client.chat.completions.create(**asked, stream=True)]
    streamed = [chunk.choices[0].logprobs for chunk in chunks]
    assert whole is not None
    assert [entry for logprobs in streamed if logprobs for entry in logprobs.content or []] == whole.content
    # One token per chunk, so each has its own; the first (role) and the last (end) have none.
    assert [bool(logprobs) for logprobs in streamed] == [False, *[True] * len(whole.content or []), False]
    for chunk in chunks:
        openai.types.chat.ChatCompletionChunk.model_validate(chunk.model_dump(), strict=True)


async def test_completion_logprobs_have_tokens_and_offsets(
    client: openai.AsyncOpenAI, gateway: Gateway, tiny_model: ServedModel
) -> None:
    token_ids = tiny_model.encoder.encode_text("a é b")
    gateway.engine.script = says_scored(token_ids, group=2)
    answer = await client.completions.create(model="tiny", prompt="x", logprobs=1)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == ["a", " ", "\ufffd", "\ufffd", " ", "b"]
    assert logprobs.token_logprobs == [-token_id / 1024 for token_id in token_ids]
    # The second token completes the character; both have the offset of the character.
    assert logprobs.text_offset == [0, 1, 2, 2, 3, 4]
    assert [answer.choices[0].text[offset] for offset in logprobs.text_offset] == list("a éé b")
    assert logprobs.top_logprobs is not None and logprobs.top_logprobs[0]["a"] == -token_ids[0] / 1024
    stream = await client.completions.create(model="tiny", prompt="x", logprobs=1, stream=True)
    streamed = [chunk.choices[0].logprobs async for chunk in stream]
    assert [token for part in streamed if part for token in part.tokens or []] == logprobs.tokens
    assert [offset for part in streamed if part for offset in part.text_offset or []] == logprobs.text_offset


@pytest.mark.parametrize("stream", [False, True])
async def test_tokens_as_ids_are_named_by_their_ids(client: openai.AsyncOpenAI, gateway: Gateway, stream: bool) -> None:
    gateway.engine.script = says_scored([70, 71, IM_END], reason=FinishReason.STOP)
    asked: Any = {"model": "tiny", "stream": stream, "extra_body": {"return_tokens_as_token_ids": True}}
    answer: Any = await client.completions.create(**asked, prompt="x", logprobs=1)
    choices = [chunk.choices[0] async for chunk in answer] if stream else [answer.choices[0]]
    parts = [choice.logprobs for choice in choices]
    names = [f"token_id:{token_id}" for token_id in (70, 71, IM_END)]
    assert [token for logprobs in parts for token in logprobs.tokens] == names
    tops = [top for logprobs in parts for top in logprobs.top_logprobs]
    assert [list(top) for top in tops] == [[f"token_id:{id_}", f"token_id:{id_ + 1}"] for id_ in (70, 71, IM_END)]
    assert [offset for logprobs in parts for offset in logprobs.text_offset] == [0, 1, 2]
    answer = await client.chat.completions.create(**asked, messages=HI, logprobs=True, top_logprobs=1)
    choices = [chunk.choices[0] async for chunk in answer] if stream else [answer.choices[0]]
    entries = [entry for choice in choices if choice.logprobs for entry in choice.logprobs.content]
    assert [(entry.token, entry.top_logprobs[0].token) for entry in entries] == [(name, name) for name in names[:2]]
    token_bytes = gateway.service.require_model().encoder.token_bytes
    assert [bytes(entry.bytes) for entry in entries] == [token_bytes.of(70), token_bytes.of(71)]


async def test_prompt_logprobs_as_ids_are_named_by_their_ids(client: openai.AsyncOpenAI, gateway: Gateway) -> None:
    def script(request: GenerationRequest) -> Any:
        scores = PromptLogprobs(1, [scored(6)])
        yield TokenEvent(request.request_id, 0, [70], logprobs=[scored(70)], prompt_logprobs=scores)
        yield finish(request, 1, FinishReason.LENGTH)

    gateway.engine.script = script
    extra = {"return_tokens_as_token_ids": True}
    answer = await client.completions.create(model="tiny", prompt=[5, 6], logprobs=1, echo=True, extra_body=extra)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.tokens == ["token_id:5", "token_id:6", "token_id:70"]
    assert logprobs.token_logprobs == [None, -6 / 1024, -70 / 1024]


async def test_logprobs_are_absent_unless_requested(client: openai.AsyncOpenAI, gateway: Gateway) -> None:
    gateway.engine.script = says_scored([70, 71])
    chat = await client.chat.completions.create(model="tiny", messages=HI, logprobs=False)
    assert chat.choices[0].logprobs is None
    assert gateway.engine.requests[0].sampling.logprobs is None
    await client.completions.create(model="tiny", prompt="x", logprobs=0)
    assert gateway.engine.requests[1].sampling.logprobs == 0


@pytest.mark.parametrize("shown", [False, True])
async def test_end_token_is_listed_only_if_shown(client: openai.AsyncOpenAI, gateway: Gateway, shown: bool) -> None:
    gateway.engine.script = says_scored([70, IM_END], reason=FinishReason.STOP)
    extra = {"include_stop_str_in_output": shown, "skip_special_tokens": False}
    answer = await client.chat.completions.create(model="tiny", messages=HI, logprobs=True, extra_body=extra)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    assert [entry.logprob for entry in logprobs.content] == [-70 / 1024, -IM_END / 1024][: 2 if shown else 1]


async def test_stop_string_ends_the_list_with_its_last_token(
    client: openai.AsyncOpenAI, gateway: Gateway, tiny_model: ServedModel
) -> None:
    token_ids = [token_id for letter in "abcd" for token_id in tiny_model.encoder.encode_text(letter)]
    gateway.engine.script = says_scored(token_ids, group=4)
    answer = await client.completions.create(model="tiny", prompt="x", logprobs=0, stop="bc")
    assert answer.choices[0].text == "a"
    assert answer.choices[0].logprobs is not None and answer.choices[0].logprobs.tokens == ["a", "b", "c"]


async def test_tokens_of_a_worker_without_logprobs_have_none(client: openai.AsyncOpenAI, gateway: Gateway) -> None:
    def script(request: GenerationRequest) -> list[StreamEvent]:
        return [TokenEvent(request.request_id, 0, [70]), finish(request, 1, FinishReason.LENGTH)]

    gateway.engine.script = script
    answer = await client.chat.completions.create(model="tiny", messages=HI, logprobs=True)
    assert answer.choices[0].logprobs is not None and answer.choices[0].logprobs.content == []


def test_infinite_logprob_is_written_as_a_number(tiny_model: ServedModel) -> None:
    spellings = tiny_model.encoder.spellings(by_id=False)
    entry = LogprobEntry(70, encoded_logprobs(TokenLogprobs(-math.inf, (71,), (-math.inf,))), 0, spellings)
    (entry_read,) = json.loads(bytes(chat_logprobs([entry])["content"]))
    assert entry_read["logprob"] == entry_read["top_logprobs"][0]["logprob"] == -9999.0
    assert completion_logprobs([entry])["token_logprobs"] == [-9999.0]


def test_tokens_with_equal_text_keep_the_likelier(tiny_model: ServedModel) -> None:
    encoder = tiny_model.encoder
    (x,), halves = encoder.encode_text("x"), encoder.encode_text("é")
    assert [encoder.token_bytes.of(half) for half in halves] == [b"\xc3", b"\xa9"]
    for chosen, scores in (
        (x, TokenLogprobs(-3.0, tuple(halves), (-0.5, -0.7))),
        (halves[1], TokenLogprobs(-0.7, (halves[0], x), (-0.5, -3.0))),
    ):
        entry = LogprobEntry(chosen, encoded_logprobs(scores), 0, encoder.spellings(by_id=False))
        assert list(completion_logprobs([entry])["top_logprobs"][0].items()) == [("\ufffd", -0.5), ("x", -3.0)]


@pytest.mark.parametrize("by_id", [False, True])
def test_token_spelling_is_computed_once(tiny_model: ServedModel, monkeypatch: pytest.MonkeyPatch, by_id: bool) -> None:
    """Cache it: finding text and bytes takes ten times as long as writing the rest of the entry."""
    asked: list[int] = []

    class Watched(TokenBytes):
        def of(self, token_id: int) -> bytes:
            asked.append(token_id)
            return super().of(token_id)

    spellings = TokenSpellings(Watched(tiny_model.encoder.tokenizer), by_id=by_id)
    entry = LogprobEntry(70, encoded_logprobs(TokenLogprobs(-1.0, (71, 72), (-2.0, -3.0))), 0, spellings)
    first = bytes(chat_logprobs([entry])["content"])
    num_asked = len(asked)
    assert bytes(chat_logprobs([entry] * 3)["content"]) == b"[" + b",".join([first[1:-1]] * 3) + b"]"
    assert len(asked) == num_asked


def test_spelling_cache_is_bounded(tiny_model: ServedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.text.token_spellings.MAX_SPELLED", 8)
    table = TokenSpellings(tiny_model.encoder.token_bytes).texts
    spelled = table.all_of(range(60, 90))
    assert len(table) <= 8
    assert spelled == [tiny_model.encoder.token_bytes.of(id_).decode(errors="replace") for id_ in range(60, 90)]
