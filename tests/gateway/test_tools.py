"""Tools through the whole gateway: the rendered prompt, the grammar, and the client's answer."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import pytest
from aiohttp import ClientResponse
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from gateway.apis.chat.schema import parse_chat
from gateway.errors import InvalidRequest
from gateway.http.json_body import decode_body
from gateway.pipeline.message_parsers import needs_special_tokens
from gateway.pipeline.request import CompletionRequest
from gateway.text.chat_template import ChatTemplate
from gateway.text.parsers.formats import call_format
from gateway.text.served_model import ServedModel
from gateway.text.tokenization import PromptEncoder
from shared.grammars import check_grammar
from shared.messages import FinishReason, GrammarKind
from tests.gateway.conftest import Gateway
from tests.gateway.fake_inference import says
from tests.tiny_model import CHAT_TEMPLATE, write_tiny_model

CHAT_URL = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"$ref": "#/$defs/city"}},
            "required": ["city"],
            "$defs": {"city": {"type": "string"}},
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
NO_CALL = {"name": "f", "arguments": "["}
NAMED = {"type": "function", "function": {"name": "get_weather"}}


def parse(**fields: Any) -> CompletionRequest:
    return parse_chat(decode_body(json.dumps({"messages": HI, "tools": [WEATHER, CLOCK], **fields}).encode()))


def schema_of(request: CompletionRequest) -> Any:
    assert request.grammar is not None and request.grammar.grammar.kind is GrammarKind.JSON_SCHEMA
    check_grammar(request.grammar.grammar)
    return json.loads(request.grammar.grammar.text)


def test_named_call_is_constrained_to_its_parameters() -> None:
    request = parse(tool_choice=NAMED)
    assert schema_of(request) == WEATHER["function"]["parameters"]
    assert request.grammar is not None and request.grammar.param == "tools[0].function.parameters"
    assert request.tools is not None and (request.tools.mode, request.tools.name) == ("named", "get_weather")


@pytest.mark.parametrize(
    ("calls", "is_valid"),
    [
        ([{"name": "get_weather", "arguments": {"city": "Rome"}}], True),
        ([{"name": "clock", "arguments": {}}, {"name": "clock", "arguments": {}}], True),
        ([{"name": "get_weather", "arguments": {"city": 1}}], False),
        ([{"name": "get_weather", "arguments": {}}], False),
        ([{"name": "other", "arguments": {}}], False),
        ([], False),
    ],
)
def test_required_call_is_constrained_to_a_list_of_calls(calls: list[Any], is_valid: bool) -> None:
    schema = schema_of(parse(tool_choice="required"))
    assert jsonschema.Draft202012Validator(schema).is_valid(calls) is is_valid


def test_required_call_without_parallel_calls_is_one() -> None:
    schema = schema_of(parse(tool_choice="required", parallel_tool_calls=False))
    assert (schema["minItems"], schema["maxItems"]) == (1, 1)


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def test_allowed_tools_hide_all_others() -> None:
    request = parse(tool_choice=allowed("auto", "clock"))
    assert request.tools is not None and (request.tools.mode, request.grammar) == ("auto", None)
    assert [tool["function"]["name"] for tool in request.tools.definitions] == ["clock"]
    required = parse(tool_choice=allowed("required", "clock"))
    assert schema_of(required) == schema_of(parse(tools=[CLOCK], tool_choice="required"))
    assert parse(tool_choice=allowed("auto", "clock", "get_weather")).tools == parse(tool_choice="auto").tools


def test_tool_choice_auto_and_none_add_no_grammar() -> None:
    assert parse().grammar is None and parse(tool_choice="auto").tools is not None
    assert parse(tool_choice="none").tools is None
    assert parse(tools=[], tool_choice="auto").tools is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice.function.name"),
        ({"tools": [], "tool_choice": allowed("auto", "clock")}, "tool_choice"),
        ({"tool_choice": allowed("auto", "clock", "other")}, "tool_choice.allowed_tools.tools[1].function.name"),
        ({"tool_choice": allowed("auto")}, "tool_choice.allowed_tools.tools"),
        ({"tool_choice": allowed("none", "clock")}, "tool_choice.allowed_tools.mode"),
        ({"tool_choice": allowed("required", "clock"), "ignore_eos": True}, "ignore_eos"),
        ({"tools": [CLOCK, CLOCK]}, "tools[1].function.name"),
        ({"tools": [{"type": "retrieval"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tool_choice": "required", "use_beam_search": True}, "use_beam_search"),
        ({"tool_choice": NAMED, "ignore_eos": True}, "ignore_eos"),
        ({"tools": [CLOCK] * 129}, "tools"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]}, "messages[0].tool_calls[0].function"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"id": "1", "function": NO_CALL}]}]},
            "messages[0].tool_calls[0].function.arguments",
        ),
    ],
)
def test_invalid_tool_use_is_refused_with_its_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        parse(**fields)
    assert raised.value.param == param and param in raised.value.message


CONVERSATION = [
    {"role": "user", "content": "Rome?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'}}
        ],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "sunny <|im_end|>"},
]


def rendered(encoder: PromptEncoder, **fields: Any) -> str:
    request = parse(messages=CONVERSATION, **fields)
    text, stand_ins = encoder.render_chat(request.prompts[0], **request.template)  # type: ignore[arg-type]
    return stand_ins.reveal(text)


def test_template_with_tools_gets_them_as_values(tiny_model_dir: Path) -> None:
    source = (
        "{% for t in tools %}{{ t.function.name }}({{ t.function.parameters.required | tojson }}) {% endfor %}"
        "{% for m in messages %}{{ m.role }}:{{ m.content }}"
        "{% for c in m.tool_calls %}{{ c.id }}={{ c.function.name }}{{ c.function.arguments.city }}{% endfor %}"
        "{{ m.tool_call_id }};{% endfor %}"
    )
    encoder = PromptEncoder((tiny_model_dir / "tokenizer.json").read_text(), ChatTemplate(source, {}))
    assert rendered(encoder, tools=[WEATHER]) == (
        'get_weather(["city"]) user:Rome?;assistant:c1=get_weatherRome;tool:sunny <|im_end|>c1;'
    )


def test_template_may_add_arguments_to_text(tiny_model_dir: Path) -> None:
    """As templates do that are made from those of DeepSeek V3 and R1."""
    source = (
        "{% if tools %}{% for m in messages %}{% for c in m.tool_calls %}"
        "{{ c.type + '<｜tool▁sep｜>' + c.function.name + '\\n```json\\n' + c.function.arguments + '\\n```' }}"
        "{% endfor %}{% endfor %}{% endif %}"
    )
    encoder = PromptEncoder((tiny_model_dir / "tokenizer.json").read_text(), ChatTemplate(source, {}))
    expected = 'function<｜tool▁sep｜>get_weather\n```json\n{"city": "Rome"}\n```'
    assert rendered(encoder, tools=[WEATHER]) == expected


def test_template_without_tools_gets_hermes_text(tiny_model: ServedModel) -> None:
    text = rendered(tiny_model.encoder)
    assert text.startswith("<|im_start|>system\nYou can call these functions:\n<tools>\n")
    assert json.dumps(WEATHER) in text and '<tool_call>\n{"name": "the name", "arguments": {}}\n</tool_call>' in text
    call = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
    assert f"<|im_start|>assistant\n{call}<|im_end|>" in text
    assert "<|im_start|>user\n<tool_response>\nsunny <|im_end|>\n</tool_response>" in text
    assert "You can call" not in rendered(tiny_model.encoder, tool_choice="none")


@pytest.fixture(scope="module")
def roomy_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model with a long context: tool definitions are long if every character is a token."""
    return write_tiny_model(tmp_path_factory.mktemp("models") / "roomy", max_model_len=4096)


@pytest.fixture
async def gateway(start_gateway: Any, roomy_model_dir: Path) -> Gateway:
    return await start_gateway(model=roomy_model_dir)


async def ask(gateway: Gateway, text: str, reason: FinishReason = FinishReason.STOP, **fields: Any) -> Any:
    """Return (message, finish reason) of a model that says `text` token by token: streamed and whole."""
    token_ids = gateway.service.require_model().encoder.encode_text(text, add_special_tokens=False)
    gateway.engine.script = says(*([token_id] for token_id in token_ids), reason=reason)
    body = {"messages": HI, "tools": [WEATHER, CLOCK], **fields}
    async with gateway.session.post(CHAT_URL, json=body) as response:
        assert response.status == 200, await response.text()
        (whole,) = ChatCompletion.model_validate(await response.json()).choices
    async with gateway.session.post(CHAT_URL, json={**body, "stream": True}) as response:
        streamed = await read_stream(response)
    calls = [(call.function.name, call.function.arguments) for call in whole.message.tool_calls or ()]  # type: ignore[union-attr]
    reasoning = getattr(whole.message, "reasoning_content", "")
    assert getattr(whole.message, "reasoning", "") == reasoning
    assert streamed == (whole.message.content or "", reasoning, calls, whole.finish_reason)
    return whole.message.content, reasoning, calls, whole.finish_reason


async def read_stream(response: ClientResponse) -> tuple[str, str, list[tuple[str, str]], str]:
    content, reasoning, finish_reason = "", "", ""
    calls: list[list[str]] = []
    for line in (await response.text()).splitlines():
        data = line.removeprefix("data: ")
        if not data or data == "[DONE]":
            continue
        (choice,) = ChatCompletionChunk.model_validate_json(data).choices
        content += choice.delta.content or ""
        reasoning += getattr(choice.delta, "reasoning_content", None) or ""
        for call in choice.delta.tool_calls or ():
            assert call.function is not None
            if call.id is not None:
                assert call.index == len(calls) and call.type == "function" and len(call.id) == 9
                calls.append([call.function.name or "", ""])
            calls[call.index][1] += call.function.arguments or ""
        finish_reason = choice.finish_reason or finish_reason
    return content, reasoning, [(name, arguments) for name, arguments in calls], finish_reason


CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich"}}\n</tool_call>'


async def test_optional_call_is_parsed(gateway: Gateway) -> None:
    expected = [("get_weather", '{"city": "Zürich"}')]
    assert await ask(gateway, CALL) == (None, "", expected, "tool_calls")
    assert await ask(gateway, f"Let me see. {CALL}") == ("Let me see. ", "", expected, "tool_calls")
    assert await ask(gateway, "No need.") == ("No need.", "", [], "stop")
    cut = CALL[: CALL.index("rich")]
    assert await ask(gateway, cut, FinishReason.LENGTH) == (None, "", [("get_weather", '{"city": "Zü')], "length")


async def test_forced_calls_are_parsed_as_their_grammar_writes_them(gateway: Gateway) -> None:
    assert await ask(gateway, '{"city": "Rome"}', tool_choice=NAMED) == (
        None, "", [("get_weather", '{"city": "Rome"}')], "tool_calls",
    )  # fmt: skip
    listed = '[{"name": "clock", "arguments": {}}, {"name": "get_weather", "arguments": {"city": "Rome"}}]'
    assert await ask(gateway, listed, tool_choice="required") == (
        None, "", [("clock", "{}"), ("get_weather", '{"city": "Rome"}')], "tool_calls",
    )  # fmt: skip
    assert gateway.engine.requests[-1].sampling.grammar is not None


async def test_call_without_tools_is_text(gateway: Gateway) -> None:
    assert await ask(gateway, CALL, tool_choice="none") == (CALL, "", [], "stop")


async def test_call_ids_derive_from_the_answer_id(gateway: Gateway) -> None:
    """A resumed stream must continue with the ids that its client has."""
    ids = set()
    token_ids = gateway.service.require_model().encoder.encode_text(CALL * 2, add_special_tokens=False)
    gateway.engine.script = says(token_ids)
    async with gateway.session.post(CHAT_URL, json={"messages": HI, "tools": [WEATHER], "n": 2}) as response:
        for choice in (await response.json())["choices"]:
            ids |= {call["id"] for call in choice["message"]["tool_calls"]}
    assert len(ids) == 4


async def test_reasoning_is_separated_by_its_parser(start_gateway: Any, roomy_model_dir: Path) -> None:
    thinking = await start_gateway(model=roomy_model_dir, reasoning_parser="qwen3")
    text = f"<think>\nHm, Zürich.\n</think>\n\nSo: {CALL}"
    assert await ask(thinking, text) == (
        "So: ", "Hm, Zürich.\n", [("get_weather", '{"city": "Zürich"}')], "tool_calls",
    )  # fmt: skip
    thought = "<think>a</think>b"
    assert await ask(thinking, thought, tools=[], guided_regex=".*") == (thought, "", [], "stop")
    plain = await start_gateway(model=roomy_model_dir)
    assert await ask(plain, thought, tools=[]) == (thought, "", [], "stop")


@pytest.mark.parametrize(
    ("parser", "text", "reasoning"),
    [
        ("qwen3", "<think>\nHm.\n</think>\n\nYes.", "<think>\nHm.\n</think>"),
        ("qwen3", "<thin air", ""),
        ("qwen3", "Yes.", ""),
        ("qwen3", "<think>not fini", "<think>not fini"),
        ("deepseek_r1", "Hm.</think>Yes.", "Hm.</think>"),
    ],
)
async def test_usage_counts_reasoning_tokens(
    start_gateway: Any, roomy_model_dir: Path, parser: str, text: str, reasoning: str
) -> None:
    gateway = await start_gateway(model=roomy_model_dir, reasoning_parser=parser)
    token_ids = gateway.service.require_model().encoder.encode_text(text)
    expected = len(gateway.service.require_model().encoder.encode_text(reasoning))
    gateway.engine.script = says(*([token_id] for token_id in token_ids))
    async with gateway.session.post(CHAT_URL, json={"messages": HI, "n": 2}) as response:
        usage = ChatCompletion.model_validate(await response.json()).usage
    assert usage is not None and usage.completion_tokens_details is not None
    assert usage.completion_tokens_details.reasoning_tokens == 2 * expected
    body = {"messages": HI, "n": 2, "stream": True, "stream_options": {"include_usage": True}}
    async with gateway.session.post(CHAT_URL, json=body) as response:
        *_, last, _ = [line for line in (await response.text()).splitlines() if line]
    assert ChatCompletionChunk.model_validate_json(last.removeprefix("data: ")).usage == usage
    async with gateway.session.post("/v1/completions", json={"prompt": "hi"}) as response:
        assert "completion_tokens_details" not in (await response.json())["usage"]


async def test_option_sets_the_parser_family(start_gateway: Any, roomy_model_dir: Path) -> None:
    mistral = await start_gateway(model=roomy_model_dir, tool_call_parser="mistral")
    assert await ask(mistral, '[TOOL_CALLS]clock[ARGS]{"a": 1}') == (None, "", [("clock", '{"a": 1}')], "tool_calls")


async def test_calls_have_the_format_that_the_prompt_asks_for(start_gateway: Any, tmp_path: Path) -> None:
    """The template of DeepSeek R1 writes earlier calls in its format, but no tools, which get the Hermes format."""
    model = write_tiny_model(tmp_path / "r1", max_model_len=4096)
    (model / "chat_template.jinja").write_text(CHAT_TEMPLATE + "{# <｜tool▁calls▁begin｜> #}")
    gateway = await start_gateway(model=model)
    assert await ask(gateway, CALL) == (None, "", [("get_weather", '{"city": "Zürich"}')], "tool_calls")


@pytest.mark.parametrize(
    ("source", "family"),
    [("{{ '[TOOL_CALLS]' }}", "mistral"), ("{{ '<|python_tag|>' }}", "llama3_json"), ("", "hermes")],
)
def test_template_implies_the_parser_family(source: str, family: str) -> None:
    calls = call_format("auto", source)
    encoder = SimpleNamespace(has_special=lambda text: text in calls.special_tokens)
    model: Any = SimpleNamespace(encoder=encoder, calls=calls, reasoning=None)
    assert calls.name == family
    assert needs_special_tokens(model, parse())
    assert not needs_special_tokens(model, parse(tool_choice="required"))
    assert not needs_special_tokens(model, parse(tools=[]))
