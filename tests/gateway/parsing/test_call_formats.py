"""Parse the tool calls and the reasoning of each family. The result does not depend on how the text is split."""

import json
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.settings import REASONING_PARSERS, TOOL_CALL_PARSERS
from gateway.text.chat_template import ChatMessage, ChatTemplate
from gateway.text.parsers.formats import (
    AUTO,
    CALL_FORMATS,
    NONE,
    REASONING_FORMATS,
    call_format,
    reasoning_format,
)
from gateway.text.parsers.harmony import Harmony
from gateway.text.parsers.message import MessageParser
from gateway.text.parsers.parts import Parser, ReasoningParser
from tests.gateway.parsing.call_templates import TEMPLATES
from tests.idle_seconds import idle_seconds

Read = tuple[str, str, list[tuple[str | None, str]]]  # content, reasoning, (name, arguments) of each call

SCHEMAS: dict[str, dict[str, Any]] = {
    "f": {
        "properties": {
            "text": {"type": "string"}, "number": {"type": "integer"}, "ratio": {"type": "number"},
            "flag": {"type": "boolean"}, "list": {"type": "array"}, "object": {"type": "object"},
            "either": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
            "kind": {"enum": ["a", 1]}, "named": {"$ref": "#/$defs/named"},
        },
        "$defs": {"named": {"type": ["integer", "string"]}},
    },
    "g": {},
}  # fmt: skip


def parsers(name: str) -> tuple[ReasoningParser | None, Parser | None]:
    family, _, thoughts = name.partition("+")
    if family == "harmony":
        return Harmony(), None
    calls = CALL_FORMATS[family]
    reasoning = REASONING_FORMATS[thoughts].parser("", calls.special_tokens[0]) if thoughts else None
    return reasoning, calls.parser(SCHEMAS)


def read(make: Callable[[], tuple[ReasoningParser | None, Parser | None]], pieces: Sequence[str]) -> Read:
    parser = MessageParser(*make(), call_id=lambda number: f"call_{number}")
    deltas = [parser.push(piece) for piece in pieces] + [parser.push("", is_last=True)]
    calls: list[list[Any]] = []
    for call in (call for delta in deltas for call in delta.tool_calls):
        if call.id is not None:
            assert call.index == len(calls)
            calls.append([call.name, ""])
        calls[call.index][1] += call.arguments
    content, reasoning = ("".join(getattr(delta, field) for delta in deltas) for field in ("content", "reasoning"))
    return content, reasoning, [(name, arguments) for name, arguments in calls]


def qwen(name: str, **values: str) -> str:
    arguments = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{arguments}</function>\n</tool_call>"


def glm(name: str, line: str = "\n", **values: str) -> str:
    arguments = "".join(
        f"<arg_key>{key}</arg_key>{line}<arg_value>{value}</arg_value>{line}" for key, value in values.items()
    )
    return f"<tool_call>{name}{line}{arguments}</tool_call>"


QUOTE = '<|"|>'
DEEPSEEK_V3 = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
    '{"text": "```"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>g\n'
    "```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
)
DEEPSEEK_V31 = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>"
    '{"number": 3}<｜tool▁call▁end｜><｜tool▁call▁begin｜>g<｜tool▁sep｜>{}<｜tool▁call▁end｜>'
    "<｜tool▁calls▁end｜>"
)
CASES: list[tuple[str, str, Read]] = [
    ("qwen3_coder", "no <call> at < all", ("no <call> at < all", "", [])),
    ("qwen3_coder", qwen("f", text="Paris", number="3"), ("", "", [("f", '{"text": "Paris", "number": 3}')])),
    ("qwen3_coder", "So:\n" + qwen("g"), ("So:\n", "", [("g", "{}")])),
    (
        "qwen3_coder",
        qwen("f", text='a\n"b"\n<x>\n', list="[1, {}]") + "\n" + qwen("g", text="é") + "\nDone",
        ("Done", "", [("f", '{"text": "a\\n\\"b\\"\\n<x>\\n", "list": [1, {}]}'), ("g", '{"text": "é"}')]),
    ),
    (
        "qwen3_coder",
        qwen("f", flag="True", object="{'a': None}"),
        ("", "", [("f", '{"flag": true, "object": {"a": null}}')]),
    ),
    (
        "qwen3_coder",
        qwen("f", number="three", ratio="2", either="null"),
        ("", "", [("f", '{"number": "three", "ratio": 2, "either": null}')]),
    ),
    (
        "qwen3_coder",
        qwen("f", unknown="12", kind="a", named="7"),
        ("", "", [("f", '{"unknown": "12", "kind": "a", "named": 7}')]),
    ),
    ("qwen3_coder", "<function=f><parameter=text>x</parameter></function>", ("", "", [("f", '{"text": "x"}')])),
    (  # the end tags of an argument and of the call are missing
        "qwen3_coder",
        "<tool_call>\n<function=f>\n<parameter=text>\nx\n<parameter=number>\n1\n</function>\n</tool_call>",
        ("", "", [("f", '{"text": "x", "number": 1}')]),
    ),
    (
        "qwen3_coder",
        "<tool_call>\n<function=f>\n<parameter=text>\nx\n</parameter>\n",
        ("", "", [("f", '{"text": "x"}')]),
    ),
    ("qwen3_coder", "<function=f>\n<parameter=text>\nx y", ("", "", [("f", '{"text": "x y')])),  # cut: stays open
    ("qwen3_coder", "<function=f>\n<parameter=number>\n12", ("", "", [("f", '{"number": "12')])),
    ("qwen3_coder", "<tool_call>\nhello", ("<tool_call>\nhello", "", [])),
    ("qwen3_coder", "<function= no name>", ("<function= no name>", "", [])),
    ("qwen3_coder+qwen3", f"<think>\n{qwen('g')}\n</think>\n\n" + qwen("g"), ("", qwen("g") + "\n", [("g", "{}")])),
    ("glm45", glm("f", text="Paris", number="3"), ("", "", [("f", '{"text": "Paris", "number": 3}')])),
    ("glm47", glm("f", "", text="Paris", list="['a']"), ("", "", [("f", '{"text": "Paris", "list": ["a"]}')])),
    ("glm47", "<tool_call>g</tool_call>", ("", "", [("g", "{}")])),
    (
        "glm45",
        "Hi\n" + glm("g") + "\n" + glm("f", "", flag="false"),
        ("Hi\n", "", [("g", "{}"), ("f", '{"flag": false}')]),
    ),
    ("glm45", "<tool_call>f<arg_key>text</arg_key><arg_value>x", ("", "", [("f", '{"text": "x')])),
    ("glm45", '<tool_call>{"name": "f"}</tool_call>', ('<tool_call>{"name": "f"}</tool_call>', "", [])),
    ("glm45+glm45", "<think>so</think>\n" + glm("g"), ("", "so", [("g", "{}")])),
    (
        "gemma4",
        f"<|tool_call>call:f{{text:{QUOTE}v{QUOTE},number:3,list:[{QUOTE}a{QUOTE},1],object:{{k:true}}}}<tool_call|>",
        ("", "", [("f", '{"text": "v", "number": 3, "list": ["a", 1], "object": {"k": true}}')]),
    ),
    ("gemma4", "<|tool_call>call:g{}<tool_call|>", ("", "", [("g", "{}")])),
    (  # vLLM PR 48678: quotes inside a string
        "gemma4",
        f"<|tool_call>call:f{{text:{QUOTE}sql({QUOTE}{QUOTE}{QUOTE} A {QUOTE}{QUOTE}{QUOTE}).df(){QUOTE},"
        f"list:[{QUOTE}x{QUOTE}]}}<tool_call|>",
        ("", "", [("f", '{"text": "sql(\\"\\"\\" A \\"\\"\\").df()", "list": ["x"]}')]),
    ),
    (
        "gemma4",
        f"<|tool_call>call:f{{text:{QUOTE}say {QUOTE}hi{QUOTE}, or {QUOTE}bye{QUOTE} {{}}{QUOTE}}}<tool_call|>",
        ("", "", [("f", '{"text": "say \\"hi\\", or \\"bye\\" {}"}')]),
    ),
    (  # vLLM issue 51284: JSON and Python strings inside lists and objects
        "gemma4",
        """<|tool_call>call:f{list:["a","b"],object:{"mode": 'fa"st\\n'}}<tool_call|>""",
        ("", "", [("f", '{"list": ["a", "b"], "object": {"mode": "fa\\"st\\n"}}')]),
    ),
    (  # vLLM issue 54256: no marker after the thoughts
        "gemma4+gemma4",
        f"<|channel>thought\nLook.\n<channel|>call:f{{text:{QUOTE}cat{QUOTE}}}",
        ("", "Look.\n", [("f", '{"text": "cat"}')]),
    ),
    ("gemma4", "call: me maybe {}", ("call: me maybe {}", "", [])),
    ("gemma4", "<|tool_call>nothing", ("<|tool_call>nothing", "", [])),
    (
        "gemma4",
        f"<|tool_call>call:g{{a:1}}<tool_call|><|tool_call>call:g{{b:{QUOTE}{QUOTE}}}<tool_call|>Done",
        ("Done", "", [("g", '{"a": 1}'), ("g", '{"b": ""}')]),
    ),
    ("gemma4", f"<|tool_call>call:g{{a:{QUOTE}cut", ("", "", [("g", '{"a": "cut')])),
    (
        "lfm2",
        """So.<|tool_call_start|>[f(text="a\\"b", number=3, flag=True, object={'k': None}), g()]<|tool_call_end|>""",
        ("So.", "", [("f", '{"text": "a\\"b", "number": 3, "flag": true, "object": {"k": null}}'), ("g", "{}")]),
    ),
    (
        "lfm2",
        '<|tool_call_start|>[{"name": "f", "arguments": {"number": 1}}]<|tool_call_end|>',
        ("", "", [("f", '{"number": 1}')]),
    ),
    ("lfm2", "<|tool_call_start|>[f(1)]<|tool_call_end|>", ("<|tool_call_start|>[f(1)]<|tool_call_end|>", "", [])),
    ("lfm2", "<|tool_call_start|>[f(number=3", ("<|tool_call_start|>[f(number=3", "", [])),
    ("lfm2", "<|tool_call_start|>[a.f(number=-3)]", ("", "", [("a.f", '{"number": -3}')])),
    ("deepseek_v3", "So. " + DEEPSEEK_V3, ("So. ", "", [("f", '{"text": "```"}'), ("g", "{}")])),
    ("deepseek_v3", DEEPSEEK_V31 + " Done", ("Done", "", [("f", '{"number": 3}'), ("g", "{}")])),
    ("mistral+mistral", '[THINK]so[/THINK][TOOL_CALLS]f[ARGS]{"number": 1}', ("", "so", [("f", '{"number": 1}')])),
    (
        "harmony",
        "<|channel|>analysis<|message|>Think.<|end|><|start|>assistant<|channel|>final<|message|>Yes <b>",
        ("Yes <b>", "Think.", []),
    ),
    (
        "harmony",
        "<|channel|>analysis<|message|>T<|end|><|start|>assistant<|channel|>commentary to=functions.f "
        '<|constrain|>json<|message|>{"number": 1}<|call|>',
        ("", "T", [("f", '{"number": 1}')]),
    ),
    (  # the recipient before the channel, two calls, a preamble
        "harmony",
        "<|channel|>commentary<|message|>I call.<|end|><|start|>assistant to=functions.f<|channel|>commentary json"
        '<|message|>{"a": "<|x"}<|call|><|start|>assistant<|channel|>commentary to=functions.g<|message|><|call|>',
        ("I call.", "", [("f", '{"a": "<|x"}'), ("g", "{}")]),
    ),
    ("harmony", "<|channel|>analysis to=functions.g<|message|>{}<|call|>", ("", "", [("g", "{}")])),
    ("harmony", "Plain text", ("Plain text", "", [])),
    ("harmony", '<|channel|>commentary to=functions.f<|message|>{"a": ', ("", "", [("f", '{"a": ')])),
]


# Outputs with which parsers of vLLM lost arguments or text, by the number of its issue or pull request.
LOST_ELSEWHERE: list[tuple[int, str, str, Read]] = [
    (21301, "hermes", '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>', ("", "", [("g", "{}")])),
    (
        13459,
        "hermes",
        '<tool_call>\n{"name": "f", "arguments": {"object": {"a": {}}}}\n</tool_call>',
        ("", "", [("f", '{"object": {"a": {}}}')]),
    ),
    (
        13622,
        "mistral",
        '[TOOL_CALLS][{"name": "f", "arguments": {"number": 3, "ratio": 4}}]',
        ("", "", [("f", '{"number": 3, "ratio": 4}')]),
    ),
    (  # calls inside the reasoning, which never ends
        39056,
        "qwen3_coder+qwen3",
        f"<think>\nI look at it.\n\n{qwen('f', text='a')}\n{qwen('g')}",
        ("", "I look at it.\n\n", [("f", '{"text": "a"}'), ("g", "{}")]),
    ),
    (39056, "hermes+qwen3", "<think>How does <tool_call> work", ("<tool_call> work", "How does ", [])),
    (
        39056,
        "hermes+qwen3",
        '<think>A <tool_call>{"name": "g"}</tool_call> is one.</think>So it is.',
        ("So it is.", 'A <tool_call>{"name": "g"}</tool_call> is one.', []),
    ),
    (39771, "qwen3_coder", "<function=f>\n<parameter=text\n</parameter>\n</function>" + qwen("g"),
     ("", "", [("f", '{"text": ""}'), ("g", "{}")])),
    (
        41967,
        "gemma4",
        f"<|tool_call>call:f{{text:{QUOTE}Milano{QUOTE}}}<tool_call|><|tool_call>call:f{{text:{QUOTE}Piacenza{QUOTE}}}"
        "<tool_call|>",
        ("", "", [("f", '{"text": "Milano"}'), ("f", '{"text": "Piacenza"}')]),
    ),
    (43221, "qwen3_coder+qwen3", f"<think>I will use the tool f.</think>{qwen('f', text='a')}",
     ("", "I will use the tool f.", [("f", '{"text": "a"}')])),
    (44326, "glm47+glm45", "<think>so</think><tool_call>g</tool_call>", ("", "so", [("g", "{}")])),
    (
        47901,
        "qwen3_coder",
        qwen("g") + "\n" + qwen("f", text="after a call without arguments"),
        ("", "", [("g", "{}"), ("f", '{"text": "after a call without arguments"}')]),
    ),
    (48702, "qwen3_coder", qwen("f", number="12.0", flag="yes", text="x"),
     ("", "", [("f", '{"number": 12.0, "flag": "yes", "text": "x"}')])),
    (
        55082,
        "deepseek_v3",
        DEEPSEEK_V31.replace('{"number": 3}', '{"text": "all of it at once"}'),
        ("", "", [("f", '{"text": "all of it at once"}'), ("g", "{}")]),
    ),
    (55495, "qwen3_coder", "<function=f>\n<parameter=\nx\n</parameter>\n</function>", ("", "", [("f", '{"": "x"}')])),
    (
        56077,
        "qwen3_coder+qwen3",
        "<think>\nI list the files.\n</think>\n\n" + qwen("f", text="git status --short") + "\n" + qwen("f", text="ls"),
        ("", "I list the files.\n", [("f", '{"text": "git status --short"}'), ("f", '{"text": "ls"}')]),
    ),
]  # fmt: skip


CASES += [(name, text, expected) for _, name, text, expected in LOST_ELSEWHERE]


LENGTHS_IN_A_MARKER = (*range(1, 9), 12, 18, 32)  # of a piece of it, in characters


@pytest.mark.parametrize(("name", "text", "expected"), CASES)
def test_calls_cut_anywhere_are_equal(name: str, text: str, expected: Read) -> None:
    assert read(lambda: parsers(name), [text]) == expected
    for size in range(1, 9):
        assert read(lambda: parsers(name), [text[at : at + size] for at in range(0, len(text), size)]) == expected
    once = [(0, cut) for cut in range(1, len(text))]
    twice = [(first, first + length) for first in range(1, len(text)) for length in LENGTHS_IN_A_MARKER]
    for first, second in once + twice:
        pieces = [text[:first], text[first:second], text[second:]]
        assert read(lambda: parsers(name), pieces) == expected, pieces


FRAGMENTS = [
    "<tool_call>", "</tool_call>", "<function=", "<function=f>", "<parameter=", "<parameter=text>", "<parameter=list>",
    "</parameter>", "</function>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<|tool_call>",
    "<tool_call|>", "call:f{", "call:", QUOTE, "<|tool_call_start|>", "<|tool_call_end|>", "[f(text=", ")]",
    "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "function", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>", "```json\n", "```", "<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|call|>",
    "analysis", "final", " to=functions.f", "{", "}", "[", "]", '"', "'", "\\", ",", ":", " ", "\n", "f", "1", "true",
    "é", '{"name": "f", "arguments": {}}',
]  # fmt: skip


@settings(max_examples=500, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.sampled_from(sorted({name for name, _, _ in CASES})),
    st.lists(st.sampled_from(FRAGMENTS), max_size=16).map("".join),
    st.data(),
)
def test_any_text_is_parsed_alike_however_cut(name: str, text: str, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(lambda: parsers(name), pieces) == read(lambda: parsers(name), [text])


STARTS = [
    "", "<tool_call>", "<function=", "<function=f><parameter=", "<function=f><parameter=text>", "<tool_call>f<arg_key>",
    "<function=f><parameter=list>", "<|tool_call>call:f{", "<|tool_call>call:f{a:", "<|tool_call>call:f{a:" + QUOTE,
    "<|tool_call>call:f{a:'", "<|tool_call_start|>", DEEPSEEK_V3[:30], DEEPSEEK_V31[:-20], "<|channel|>",
]  # fmt: skip


@pytest.mark.parametrize("family", sorted({name.partition("+")[0] for name, _, _ in CASES}))
@pytest.mark.timeout(600)  # 75 texts each: not for `make quick`
def test_parse_time_is_linear(family: str) -> None:
    """Allow 1 s for 0.1 s of work on an idle core; reading all text again at every piece takes longer."""
    for start in STARTS:
        for filler in (" ", "x", "<", QUOTE, ","):
            text = start + filler * (10_000 // len(filler))

            def parse(text: str = text) -> None:
                reasoning, tools = parsers(family)
                parser = tools or reasoning
                assert parser is not None
                for at in range(0, len(text), 4):
                    list(parser.push(text[at : at + 4]))
                list(parser.finish())

            assert idle_seconds(parse) < 1, (start, filler)


VALUES: dict[str, st.SearchStrategy[Any]] = {
    "string": st.text(st.characters(codec="utf-8", exclude_characters="\r<>"), max_size=20),
    "integer": st.integers(-(10**9), 10**9),
    "number": st.floats(allow_nan=False, allow_infinity=False),
    "boolean": st.booleans(),
    "array": st.lists(st.one_of(st.integers(), st.booleans(), st.none(), st.text("ab \"'", max_size=4)), max_size=3),
    "object": st.dictionaries(st.text("abc", min_size=1, max_size=3), st.integers(), max_size=3),
}


@st.composite
def typed_arguments(draw: st.DrawFn) -> tuple[dict[str, Any], dict[str, Any]]:
    """Draw a schema and arguments that it allows."""
    names = draw(st.lists(st.text("abcdefgh_", min_size=1, max_size=6), unique=True, max_size=4))
    types = {name: draw(st.sampled_from(sorted(VALUES))) for name in names}
    return {"properties": {name: {"type": kind} for name, kind in types.items()}}, {
        name: draw(VALUES[kind]) for name, kind in types.items()
    }


ASKED: ChatMessage = {"role": "user", "content": "hi"}


@cache
def template_of(family: str) -> ChatTemplate:
    return ChatTemplate(TEMPLATES[family], {})


def written_call(family: str, arguments: dict[str, Any]) -> str:
    """Return the text that the family's template writes for a call, which its models write too."""
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    template = template_of(family)
    prompt = template.render([ASKED])
    message: ChatMessage = {"role": "assistant", "content": "", "tool_calls": [call]}
    return template.render([ASKED, message], add_generation_prompt=False).removeprefix(prompt).split("<|im_end|>")[0]


@pytest.mark.parametrize("family", TEMPLATES)
@settings(max_examples=200, suppress_health_check=[HealthCheck.too_slow])
@given(drawn=typed_arguments(), size=st.integers(1, 8))
def test_rendered_arguments_are_read_back(family: str, drawn: tuple[dict[str, Any], dict[str, Any]], size: int) -> None:
    schema, values = drawn
    text = written_call(family, values)

    def make() -> tuple[ReasoningParser | None, Parser | None]:
        return (Harmony(), None) if family == "harmony" else (None, CALL_FORMATS[family].parser({"f": schema}))

    _, _, calls = read(make, [text[at : at + size] for at in range(0, len(text), size)])
    assert calls[0][0] == "f"
    assert json.loads(calls[0][1]) == values


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_fence_without_a_line_end_is_content(size: int) -> None:
    text = DEEPSEEK_V31.partition("{")[0] + "```" + "x" * 1_000

    def make() -> tuple[ReasoningParser | None, Parser | None]:
        return None, CALL_FORMATS["deepseek_v3"].parser({})

    content, _, calls = read(make, [text[at : at + size] for at in range(0, len(text), size)])
    assert content == "x" * 1_000
    assert [arguments for _, arguments in calls] == ["{}"]


@pytest.mark.parametrize("family", TEMPLATES)
def test_template_selects_its_call_format(family: str) -> None:
    assert call_format("auto", TEMPLATES[family]).name == family
    assert call_format("hermes", TEMPLATES[family]).name == "hermes"


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("harmony", "harmony"),
        ("gemma4", "gemma4"),
        ("glm45", "qwen3"),
        ("deepseek_v3", "qwen3"),
        ("mistral", "mistral"),
    ],
)
def test_template_selects_its_reasoning_format(family: str, name: str) -> None:
    found = reasoning_format("auto", TEMPLATES[family])
    assert found is not None and found.name == name
    assert reasoning_format("none", TEMPLATES[family]) is None


def test_settings_name_each_format() -> None:
    assert set(TOOL_CALL_PARSERS) == {AUTO, *CALL_FORMATS}
    assert set(REASONING_PARSERS) == {AUTO, NONE, *REASONING_FORMATS}


def test_open_tag_in_the_prompt_starts_reasoning() -> None:
    parse = REASONING_FORMATS["qwen3"].parser
    assert read(lambda: (parse("<|im_start|>assistant\n<think>\n", ""), None), ["so</think>yes"])[:2] == ("yes", "so")
    assert read(lambda: (parse("<think>\n\n</think>\n\n", ""), None), ["yes"])[:2] == ("yes", "")
