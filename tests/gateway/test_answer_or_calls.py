"""A response format together with tools: the model answers in the format or calls, and each is parsed as what it is."""

import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, Tokenizer

from gateway.pipeline.call_grammar import answer_or_calls
from gateway.pipeline.request import CompletionRequest
from gateway.text.parsers.message import MessageParser, whole_calls
from gateway.text.parsers.tool_calls import GRAMMAR_FAMILIES, answer_or_calls_parser
from gateway.text.tokenization import PromptEncoder
from shared.grammars import check_grammar, guidance_text, parser_limits
from shared.messages import FinishReason, Grammar, GrammarKind, TokenEvent
from tests.gateway.conftest import Gateway
from tests.gateway.fake_inference import finish, says
from tests.gateway.responses import asked, model_says, streamed
from tests.gateway.test_tools import HI, NAMED, ask, parse
from tests.tiny_model import IM_END, write_tiny_model

CITY = {"enum": ["Rome", "Oslo"]}
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": {"$ref": "#/$defs/city"}},
            "required": ["city"],
            "additionalProperties": False,
            "$defs": {"city": CITY},
        },
    },
}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
CLOCK: dict[str, Any] = {"type": "function", "function": {"name": "clock", "strict": True, "parameters": NOTHING}}
TOWN = {
    "type": "object",
    "properties": {"name": {"enum": ["Rome", "get_weather"]}, "size": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "size"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "town", "schema": TOWN}}
ANSWER = '{"name": "get_weather", "size": 3}'  # as similar to a call as an answer can be
MARKS = ("<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]")


@pytest.fixture(scope="module")
def roomy_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "roomy", max_model_len=4096)


@pytest.fixture(scope="module")
def marked_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model in which the marks of calls are special tokens."""
    directory = write_tiny_model(tmp_path_factory.mktemp("models") / "marked", max_model_len=4096)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in MARKS])
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


@pytest.fixture
async def gateway(start_gateway: Any, roomy_model_dir: Path) -> Gateway:
    return await start_gateway(model=roomy_model_dir)


def both(**fields: Any) -> CompletionRequest:
    return parse(tools=[WEATHER, CLOCK], response_format=FORM, **fields)


class GrammarSampler:
    """A model that samples any token that the grammar allows, and slightly prefers the end."""

    def __init__(self, directory: Path, grammar: Grammar) -> None:
        text = (directory / "tokenizer.json").read_text()
        self._decode = PromptEncoder(text, None).decode
        self._matcher = LLMatcher(LLTokenizer(text, eos_token=IM_END), guidance_text(grammar), limits=parser_limits())
        assert not self._matcher.is_error(), self._matcher.get_error()

    def sample_text(self, seed: int) -> str:
        chosen, matcher = random.Random(seed), self._matcher.deep_copy()
        token_ids: list[int] = []
        while len(token_ids) < 600:
            allowed = [token_id for token_id, bias in enumerate(matcher.compute_logit_bias()) if bias]
            may_end = IM_END in allowed and chosen.random() < 0.4
            token_id = IM_END if may_end else chosen.choice(allowed)
            if token_id == IM_END:
                assert self._taken_over(token_ids)
                return self._decode(token_ids, skip_special_tokens=False)
            assert matcher.consume_token(token_id)
            token_ids.append(token_id)
        raise AssertionError("no end")

    def _taken_over(self, token_ids: list[int]) -> bool:
        """Return the state of another worker that resumes with the existing tokens."""
        matcher = self._matcher.deep_copy()
        return bool(matcher.consume_tokens(token_ids)) and matcher.is_accepting()


def is_of_both(text: str, family: str, *, is_parallel: bool, seed: int) -> bool:
    """Return whether `text` calls. For any split, it must parse as one answer, or as calls of known functions."""
    chosen = random.Random(seed)
    cuts = sorted(chosen.randrange(len(text) + 1) for _ in range(4))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    parser = MessageParser(None, answer_or_calls_parser(family, ["get_weather", "clock"]), str)
    deltas = [parser.push(piece, is_last=index == len(cuts)) for index, piece in enumerate(pieces)]
    content, calls = "".join(delta.content for delta in deltas), whole_calls(c for d in deltas for c in d.tool_calls)
    if not calls:
        jsonschema.validate(json.loads(content), TOWN)
        assert content == text
        return False
    assert content == "" and (is_parallel or len(calls) == 1)
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in (WEATHER, CLOCK)}
    for call in calls:
        jsonschema.validate(json.loads(call.arguments), schemas[call.name or ""])
    return True


@pytest.mark.parametrize("is_parallel", [True, False])
@pytest.mark.parametrize("family", GRAMMAR_FAMILIES)
@pytest.mark.parametrize("model", ["roomy_model_dir", "marked_model_dir"])
def test_any_text_of_the_grammar_is_parsed_as_what_it_is(
    family: str, model: str, is_parallel: bool, request: pytest.FixtureRequest
) -> None:
    directory = request.getfixturevalue(model)
    asked_for = both(parallel_tool_calls=is_parallel)
    assert asked_for.answer_grammar is not None and asked_for.tools is not None
    encoder = PromptEncoder((directory / "tokenizer.json").read_text(), None)
    grammar = answer_or_calls(asked_for.answer_grammar.grammar, asked_for.tools, family, encoder.special_id)
    check_grammar(grammar)  # as the gateway does, which then has no tokenizer
    sampler = GrammarSampler(directory, grammar)
    kinds = [is_of_both(sampler.sample_text(seed), family, is_parallel=is_parallel, seed=seed) for seed in range(40)]
    assert {True, False} == set(kinds)


@pytest.mark.parametrize(
    ("answer", "is_of_it"),
    [
        (Grammar(GrammarKind.REGEX, r"a/[}{]b{1,3}"), re.compile(r"a/[}{]b{1,3}").fullmatch),
        (Grammar(GrammarKind.CHOICE, '["yes", "\\"}"]'), ("yes", '"}').__contains__),
        (Grammar(GrammarKind.JSON_SCHEMA, json.dumps({"const": "} start: ::= \n"})),
         lambda text: json.loads(text) == "} start: ::= \n"),
        (Grammar(GrammarKind.GRAMMAR, 'start: call\ncall: "(" call ")" | /[ab}]/'),
         re.compile(r"\(*[ab}]\)*").fullmatch),
        (Grammar(GrammarKind.GRAMMAR, 'root ::= "x" [yz}] "{"?'), re.compile(r"x[yz}]\{?").fullmatch),
    ],
)  # fmt: skip
def test_any_response_format_combines_with_calls(
    roomy_model_dir: Path, answer: Grammar, is_of_it: Callable[[str], object]
) -> None:
    tools = both().tools
    assert tools is not None
    sampler = GrammarSampler(roomy_model_dir, answer_or_calls(answer, tools, "hermes", lambda text: None))
    said = {sampler.sample_text(seed) for seed in range(60)}
    answers = {text for text in said if not text.startswith("<tool_call>")}
    assert answers and answers < said
    assert all(is_of_it(text) for text in answers)


def test_arguments_are_constrained_for_strict_tools() -> None:
    lax = {"type": "function", "function": {**WEATHER["function"], "strict": None}}
    tools = parse(tools=[lax, CLOCK], response_format=FORM).tools
    assert tools is not None
    assert tools.functions == {"get_weather": {"type": "object"}, "clock": NOTHING}


CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
ROME = ("get_weather", '{"city": "Rome"}')
LIKE_A_CALL = f'{{"name": "Rome", "said": {json.dumps(CALL)}}}'


async def test_answer_and_calls_pass_through_the_gateway(gateway: Gateway) -> None:
    fields: dict[str, Any] = {"tools": [WEATHER, CLOCK], "response_format": FORM}
    assert await ask(gateway, ANSWER, **fields) == (ANSWER, "", [], "stop")
    assert await ask(gateway, CALL, **fields) == (None, "", [ROME], "tool_calls")
    assert await ask(gateway, f"{CALL}\n{CALL}", **fields) == (None, "", [ROME, ROME], "tool_calls")
    assert await ask(gateway, LIKE_A_CALL, **fields) == (LIKE_A_CALL, "", [], "stop")
    cut = CALL[: CALL.index('me"}')]
    assert await ask(gateway, cut, FinishReason.LENGTH, **fields) == (
        None, "", [("get_weather", '{"city": "Ro')], "length",
    )  # fmt: skip
    grammar = gateway.engine.requests[-1].sampling.grammar
    assert grammar is not None and grammar.kind is GrammarKind.GRAMMAR and "get_weather" in grammar.text
    json_object = await ask(gateway, "{}", tools=[CLOCK], response_format={"type": "json_object"})
    assert json_object == ("{}", "", [], "stop")
    free = await ask(gateway, f"I look. {CALL}", tools=[WEATHER], response_format={"type": "text"})
    assert free == ("I look. ", "", [ROME], "tool_calls")
    assert gateway.engine.requests[-1].sampling.grammar is None


async def test_each_choice_is_parsed_independently(gateway: Gateway) -> None:
    token_ids = [gateway.service.require_model().encoder.encode_text(text) for text in (ANSWER, CALL)]

    def script(request: Any) -> Any:
        for choice, ids in enumerate(token_ids):
            yield TokenEvent(request.request_id, 0, ids, choice, FinishReason.STOP)
        yield finish(request, sum(map(len, token_ids)))

    gateway.engine.script = script
    body = {"messages": HI, "tools": [WEATHER], "response_format": FORM, "n": 2}
    async with gateway.session.post("/v1/chat/completions", json=body) as reply:
        answer, call = (await reply.json())["choices"]
    assert (answer["message"]["content"], answer["finish_reason"]) == (ANSWER, "stop")
    assert (call["message"]["content"], call["finish_reason"]) == (None, "tool_calls")


async def test_forced_call_excludes_an_answer(gateway: Gateway) -> None:
    fields: dict[str, Any] = {"tools": [WEATHER, CLOCK], "response_format": FORM}
    listed = '[{"name": "get_weather", "arguments": {"city": "Rome"}}]'
    assert await ask(gateway, listed, tool_choice="required", **fields) == (None, "", [ROME], "tool_calls")
    assert await ask(gateway, '{"city": "Rome"}', tool_choice=NAMED, **fields) == (None, "", [ROME], "tool_calls")
    assert await ask(gateway, CALL, tool_choice="none", **fields) == (CALL, "", [], "stop")
    grammar = gateway.engine.requests[-1].sampling.grammar
    assert grammar is not None and json.loads(grammar.text) == TOWN


async def test_reasoning_parser_keeps_answer_and_calls_intact(start_gateway: Any, roomy_model_dir: Path) -> None:
    for parser in ("qwen3", "deepseek_r1"):
        gateway = await start_gateway(model=roomy_model_dir, reasoning_parser=parser)
        fields: dict[str, Any] = {"tools": [WEATHER, CLOCK], "response_format": FORM}
        assert await ask(gateway, ANSWER, **fields) == (ANSWER, "", [], "stop")
        assert await ask(gateway, CALL, **fields) == (None, "", [ROME], "tool_calls")


async def test_call_marks_that_are_special_tokens_are_parsed(start_gateway: Any, marked_model_dir: Path) -> None:
    gateway = await start_gateway(model=marked_model_dir)
    encoder = gateway.service.require_model().encoder
    fields: dict[str, Any] = {"messages": HI, "tools": [WEATHER, CLOCK], "response_format": FORM}
    mark, end = encoder.special_id("<tool_call>"), encoder.special_id("</tool_call>")
    inner = encoder.encode_text('\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n')
    gateway.engine.script = says([mark], inner, [end])
    async with gateway.session.post("/v1/chat/completions", json=fields) as reply:
        (choice,) = (await reply.json())["choices"]
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": '{"city": "Rome"}'}
    grammar = gateway.engine.requests[-1].sampling.grammar
    assert grammar is not None and f"<[{mark}]>" in grammar.text and f"<[{end}]>" in grammar.text


async def test_responses_api_combines_format_and_tools(start_gateway: Any, roomy_model_dir: Path) -> None:
    gateway = await start_gateway(model=roomy_model_dir)
    tools = [{"type": "function", **WEATHER["function"]}]
    fields: dict[str, Any] = {"tools": tools, "text": {"format": {"type": "json_schema", "name": "t", "schema": TOWN}}}
    for text, kind in ((ANSWER, "message"), (CALL, "function_call")):
        model_says(gateway, text)
        whole, last = await asked(gateway.session, **fields), (await streamed(gateway.session, **fields))[-1].response
        assert [item.type for item in whole.output] == [item.type for item in last.output] == [kind]
        if kind == "message":
            assert whole.output_text == last.output_text == ANSWER
        else:
            (call,) = list[Any](whole.output)
            assert (call.name, call.arguments) == ROME


UNFOLLOWED = {"type": "object", "not": {}}
BAD_FORM = {"type": "json_schema", "json_schema": {"schema": UNFOLLOWED}}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"response_format": BAD_FORM}, "response_format.json_schema.schema"),
    ({"response_format": BAD_FORM, "tool_choice": "required"}, "response_format.json_schema.schema"),
    ({"response_format": FORM, "tools": [
        {"type": "function", "function": {"name": "f", "strict": True, "parameters": UNFOLLOWED}}]}, "tools"),
    ({"guided_grammar": "start: ("}, "guided_grammar"),
    ({"response_format": FORM, "guided_regex": "a"}, "guided_regex"),
    ({"response_format": FORM, "ignore_eos": True}, "ignore_eos"),
    ({"response_format": FORM, "use_beam_search": True, "n": 2}, "use_beam_search"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param"), REFUSED, ids=lambda value: str(value)[:50])
async def test_unsupported_combination_is_refused_with_its_field(
    gateway: Gateway, fields: dict[str, Any], param: str
) -> None:
    body = {"messages": HI, "tools": [WEATHER], **fields}
    async with gateway.session.post("/v1/chat/completions", json=body) as reply:
        error = (await reply.json())["error"]
    assert (reply.status, error["param"]) == (400, param)
    assert gateway.engine.requests == []
