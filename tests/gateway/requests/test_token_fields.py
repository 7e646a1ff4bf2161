"""allowed_token_ids, bad_words and logprob_token_ids: the engine's parameters and the client's answer."""

from typing import Any

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion

from gateway.errors import InvalidRequest
from gateway.pipeline.fields import MAX_BAD_WORD_TOKENS, words_token_ids
from gateway.text.served_model import ServedModel
from shared.messages import SamplingParams
from tests.gateway.conftest import Gateway
from tests.gateway.fake_inference import says
from tests.gateway.text.test_logprobs import says_scored

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
BODIES: dict[str, dict[str, Any]] = {CHAT: {"messages": [{"role": "user", "content": "hi"}]}, TEXT: {"prompt": "hi"}}


async def asked(gateway: Gateway, url: str, **fields: Any) -> SamplingParams:
    async with gateway.session.post(url, json={**BODIES[url], **fields}) as response:
        assert response.status == 200, await response.text()
        assert "x-pagestream-ignored" not in response.headers
    return gateway.engine.requests[-1].sampling


@pytest.mark.parametrize("url", [CHAT, TEXT])
async def test_token_fields_reach_the_engine_as_ids(gateway: Gateway, tiny_model: ServedModel, url: str) -> None:
    gateway.engine.script = says([70])
    sampling = await asked(gateway, url, allowed_token_ids=[9, 7, 9], bad_words=["end", " the"])
    assert sampling.allowed_token_ids == (9, 7)
    words = [tiny_model.encoder.encode_text(text) for text in ("end", " end", "the", " the")]
    assert sampling.bad_words == tuple(map(tuple, words))
    plain = await asked(gateway, url, allowed_token_ids=None, bad_words=[], logprob_token_ids=[])
    assert (plain.allowed_token_ids, plain.bad_words, plain.logprob_token_ids) == (None, (), ())


def test_bad_word_is_forbidden_once_in_both_forms() -> None:
    spell = {"a": [1], " a": [2], "b": [3], " b": [3], " ": [4], "c": [5], " c": [6, 5]}
    assert words_token_ids(["a", " a", "b", " ", "c"], spell.__getitem__) == ((1,), (2,), (3,), (4,), (5,), (6, 5))
    with pytest.raises(InvalidRequest, match="no tokens") as raised:
        words_token_ids(["a", "x"], lambda text: [] if "x" in text else [1])
    assert raised.value.param == "bad_words[1]"


def test_bad_words_stop_encoding_at_the_token_limit() -> None:
    """Accept the exact limit; above it, encode nothing further."""
    encoded: list[str] = []

    def encode(text: str) -> list[int]:
        encoded.append(text)
        return [len(encoded)] * 128

    allowed = [f"word {number}" for number in range(MAX_BAD_WORD_TOKENS // 256)]
    assert sum(map(len, words_token_ids(allowed, encode))) == MAX_BAD_WORD_TOKENS
    encoded.clear()
    with pytest.raises(InvalidRequest, match=f"at most {MAX_BAD_WORD_TOKENS} tokens") as raised:
        words_token_ids([*allowed, *map(str, range(400))], encode)
    assert raised.value.param == "bad_words"
    assert len(encoded) == 2 * (len(allowed) + 1)


async def test_named_tokens_replace_the_top_logprobs(gateway: Gateway, tiny_model: ServedModel) -> None:
    """The script, like the engine, sends two alternatives for each token."""
    gateway.engine.script = says_scored(tiny_model.encoder.encode_text("It is"))
    sampling = await asked(gateway, CHAT, logprobs=True, top_logprobs=3, logprob_token_ids=[8, 5, 8])
    assert (sampling.logprobs, sampling.logprob_token_ids) == (0, (8, 5))
    body = {**BODIES[CHAT], "logprobs": True, "logprob_token_ids": [8, 5]}
    async with gateway.session.post(CHAT, json=body) as response:
        (choice,) = ChatCompletion.model_validate(await response.json(), strict=True).choices
    assert choice.logprobs is not None and choice.logprobs.content is not None
    for entry in choice.logprobs.content:
        assert len(entry.top_logprobs) in {2, 3} and entry.top_logprobs[0].token == entry.token
    assert (await asked(gateway, TEXT, logprobs=5, logprob_token_ids=[8])).logprobs == 0
    async with gateway.session.post(TEXT, json={"prompt": "hi", "logprobs": 0, "logprob_token_ids": [8]}) as response:
        assert Completion.model_validate(await response.json()).choices[0].logprobs is not None
