"""Harmony, the message format of gpt-oss: constraints hold inside its channels, and chats are parsed."""

import json
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, Tokenizer

from gateway.pipeline.harmony_grammar import in_channels
from gateway.text.parsers.harmony import SPECIAL_TOKENS
from gateway.text.tokenization import PromptEncoder
from shared.grammars import check_grammar, guidance_text, json_schema_grammar, parser_limits
from tests.gateway.conftest import Gateway
from tests.gateway.fake_inference import says
from tests.gateway.test_tools import HI, NAMED, WEATHER, ask
from tests.tiny_model import IM_END, write_tiny_model

TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}<|start|>assistant"
    "{# <|channel|> #}{% if tools %}{% endif %}"
)
ANSWER = json_schema_grammar({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
FUNCTIONS = {"get_weather": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}
THOUGHT = "<|channel|>analysis<|message|>Hm {}.<|end|><|start|>assistant"
FINAL = '<|channel|>final<|message|>{"a": 1}'
CALL = '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Rome"}'


@pytest.fixture(scope="module")
def harmony_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = write_tiny_model(tmp_path_factory.mktemp("models") / "harmony", max_model_len=4096)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in SPECIAL_TOKENS])
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return directory


@pytest.fixture
async def gateway(start_gateway: Any, harmony_model_dir: Path) -> Gateway:
    return await start_gateway(model=harmony_model_dir)


@pytest.mark.parametrize(
    ("text", "is_answer", "is_call"),
    [
        (FINAL, True, False),
        (THOUGHT + FINAL, True, False),
        (CALL, False, True),
        (THOUGHT + CALL, False, True),
        ('{"a": 1}', False, False),
        ('<|channel|>final<|message|>{"b"', False, False),
        (CALL.replace("get_weather", "other"), False, False),
    ],
)
def test_constraint_holds_after_the_header(harmony_model_dir: Path, text: str, is_answer: bool, is_call: bool) -> None:
    tokenizer = (harmony_model_dir / "tokenizer.json").read_text()
    encoder = PromptEncoder(tokenizer, None)
    token_ids = encoder.encode_text(text, add_special_tokens=False)
    for answer, functions, is_allowed in ((ANSWER, {}, is_answer), (None, FUNCTIONS, is_call)):
        grammar = in_channels(answer, functions, encoder.special_id)
        check_grammar(grammar)
        matcher = LLMatcher(LLTokenizer(tokenizer, eos_token=IM_END), guidance_text(grammar), limits=parser_limits())
        assert (matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()) == is_allowed


async def test_chat_separates_channels(gateway: Gateway) -> None:
    assert await ask(gateway, THOUGHT + FINAL, tools=[]) == ('{"a": 1}', "Hm {}.", [], "stop")
    assert await ask(gateway, THOUGHT + CALL) == (None, "Hm {}.", [("get_weather", '{"city": "Rome"}')], "tool_calls")


async def test_forced_call_is_parsed_from_its_channel(gateway: Gateway) -> None:
    for choice in ("required", NAMED):
        read = await ask(gateway, THOUGHT + CALL, tools=[WEATHER], tool_choice=choice)
        assert read == (None, "Hm {}.", [("get_weather", '{"city": "Rome"}')], "tool_calls")
        grammar = gateway.engine.requests[-1].sampling.grammar
        assert grammar is not None and "analysis" in grammar.text


async def test_stream_has_reasoning_before_content(gateway: Gateway) -> None:
    token_ids = gateway.service.require_model().encoder.encode_text(THOUGHT + FINAL, add_special_tokens=False)
    gateway.engine.script = says(*([token_id] for token_id in token_ids))
    async with gateway.session.post("/v1/chat/completions", json={"messages": HI, "stream": True}) as response:
        lines = [line[6:] for line in (await response.text()).splitlines() if line.startswith("data: {")]
    deltas = [json.loads(line)["choices"][0]["delta"] for line in lines]
    assert "".join(delta.get("reasoning") or "" for delta in deltas) == "Hm {}."
    assert "".join(delta.get("content") or "" for delta in deltas) == '{"a": 1}'
