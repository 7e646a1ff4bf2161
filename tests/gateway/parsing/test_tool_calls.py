"""Parse tool calls as models write them. The result does not depend on how the text is split."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.text.parsers.formats import CALL_FORMATS, REASONING_FORMATS
from gateway.text.parsers.message import MessageDelta, MessageParser, ToolCallDelta, whole_calls
from gateway.text.parsers.parts import Content, Parser, ReasoningParser
from gateway.text.parsers.tool_calls import NamedCall, hermes, listed, llama3_json, mistral
from tests.idle_seconds import idle_seconds

Read = tuple[str, str, list[tuple[str | None, str]]]  # content, reasoning, (name, arguments) of each call


def offered(family: str, functions: Sequence[str]) -> Parser:
    return CALL_FORMATS[family].parser({name: {} for name in functions})


MAKERS: dict[str, Callable[[], tuple[ReasoningParser | None, Parser | None]]] = {
    "hermes": lambda: (None, hermes()),
    "llama3_json": lambda: (None, llama3_json()),
    "mistral": lambda: (None, mistral()),
    "listed": lambda: (None, listed()),
    "named": lambda: (None, NamedCall("f")),
    "qwen3": lambda: (REASONING_FORMATS["qwen3"].parser("", ""), None),
    "deepseek_r1": lambda: (REASONING_FORMATS["deepseek_r1"].parser("", ""), None),
    "offered": lambda: (None, offered("hermes", ("f", "get_f", "fa"))),
    "offered llama3_json": lambda: (None, offered("llama3_json", ("f",))),
    "offered mistral": lambda: (None, offered("mistral", ("f",))),
    "qwen3 and offered": lambda: (REASONING_FORMATS["qwen3"].parser("", ""), offered("hermes", ("f",))),
    "qwen3 and hermes": lambda: (REASONING_FORMATS["qwen3"].parser("", ""), hermes()),
}


def read(name: str, pieces: Sequence[str]) -> Read:
    parser = MessageParser(*MAKERS[name](), call_id=lambda number: f"call_{number}")
    deltas = [parser.push(piece) for piece in pieces] + [parser.push("", is_last=True)]
    calls: dict[int, list[Any]] = {}
    for delta in deltas:
        for call in delta.tool_calls:
            if call.id is not None:
                assert call.index == len(calls) and call.id == f"call_{call.index}"
                calls[call.index] = [call.name, ""]
            calls[call.index][1] += call.arguments
    assert parser.num_calls == len(calls)
    content, reasoning = ("".join(getattr(delta, field) for delta in deltas) for field in ("content", "reasoning"))
    return content, reasoning, [(called, arguments) for called, arguments in calls.values()]


CALL = '{"name": "f", "arguments": {"a": [1, "}]\\"{"], "é": {}}}'
ARGUMENTS = '{"a": [1, "}]\\"{"], "é": {}}'
CASES: list[tuple[str, str, Read]] = [
    ("hermes", "no call at all < <tool", ("no call at all < <tool", "", [])),
    ("hermes", f"<tool_call>\n{CALL}\n</tool_call>", ("", "", [("f", ARGUMENTS)])),
    ("hermes", f"Wait.\n<tool_call>{CALL}</tool_call>\n\n", ("Wait.\n", "", [("f", ARGUMENTS)])),
    (
        "hermes",
        f"<tool_call>{CALL}</tool_call>\n<tool_call>{CALL.replace('f', 'g', 1)}</tool_call> done",
        ("done", "", [("f", ARGUMENTS), ("g", ARGUMENTS)]),
    ),
    ("hermes", f"<tool_call>[{CALL}, {CALL}]</tool_call>", ("", "", [("f", ARGUMENTS), ("f", ARGUMENTS)])),
    ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', ("", "", [("f", '{"a": 1}')])),
    ("hermes", '<tool_call>{"id": [1, {"name": "x"}], "name": "f"}</tool_call>', ("", "", [("f", "{}")])),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', ("", "", [("f", '{"a": 1}')])),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1', ("", "", [("f", '{"a": 1')])),  # cut by its length
    ("hermes", '<tool_call>{"name": "f', ('<tool_call>{"name": "f', "", [])),
    ("hermes", '<tool_call>{"x": 1}</tool_call> y', ('<tool_call>{"x": 1}</tool_call> y', "", [])),
    ("hermes", "<tool_call> </tool_call>x", ("<tool_call> </tool_call>x", "", [])),
    ("hermes", "<tool_call>f(1)</tool_call>", ("<tool_call>f(1)</tool_call>", "", [])),
    ("hermes", f'<tool_call>{{"x" <tool_call>{CALL}', ('<tool_call>{"x" ', "", [("f", ARGUMENTS)])),
    ("hermes", f"<tool_call>{CALL}</tool_call></tool_call>", ("</tool_call>", "", [("f", ARGUMENTS)])),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}, ?}', ("?}", "", [("f", "{}")])),
    ("llama3_json", '{"name": "f", "parameters": {"a": 1}}', ("", "", [("f", '{"a": 1}')])),
    ("llama3_json", '<|python_tag|>{"name": "f", "parameters": {}}', ("", "", [("f", "{}")])),
    (
        "llama3_json",
        '{"name": "f", "parameters": {}}; {"name": "g", "parameters": {"b": null}}',
        ("", "", [("f", "{}"), ("g", '{"b": null}')]),
    ),
    ("llama3_json", "[1, 2] is a list", ("[1, 2] is a list", "", [])),
    ("llama3_json", '\n{"a": 1}\n', ('\n{"a": 1}\n', "", [])),
    ("llama3_json", 'so {"name": "f", "parameters": {}}', ('so {"name": "f", "parameters": {}}', "", [])),
    ("mistral", f"[TOOL_CALLS] [{CALL}, {CALL}]", ("", "", [("f", ARGUMENTS), ("f", ARGUMENTS)])),
    ("mistral", '[TOOL_CALLS]get_f[ARGS]{}[TOOL_CALLS]g{"a": 1}', ("", "", [("get_f", "{}"), ("g", '{"a": 1}')])),
    ("mistral", "[TOOL_CALLS]what is this", ("[TOOL_CALLS]what is this", "", [])),
    ("mistral", "[TOOL_CALLS]f[ARG", ("[TOOL_CALLS]f[ARG", "", [])),
    ("listed", f" [{CALL} ,\n{CALL}]", ("", "", [("f", ARGUMENTS), ("f", ARGUMENTS)])),
    ("named", ' {"a": 1}', ("", "", [("f", ' {"a": 1}')])),
    ("named", "", ("", "", [])),
    ("qwen3", "<think>\nso\n</think>\n\nYes </think>", ("Yes </think>", "so\n", [])),
    ("qwen3", "Yes <think>no</think>", ("Yes <think>no</think>", "", [])),
    ("qwen3", " \n", (" \n", "", [])),
    ("qwen3", "<think>so </thin", ("", "so </thin", [])),
    ("deepseek_r1", "so</think>Yes", ("Yes", "so", [])),
    ("deepseek_r1", "<think>so</think>\nYes", ("Yes", "so", [])),
    ("deepseek_r1", "<thi", ("", "<thi", [])),
    ("offered", CALL, ("", "", [("f", ARGUMENTS)])),
    ("offered", f"\n{CALL}\n", ("", "", [("f", ARGUMENTS)])),
    ("offered", f"```json\n{CALL}\n```", ("", "", [("f", ARGUMENTS)])),
    ("offered", f"```\n{CALL}\n```\n", ("", "", [("f", ARGUMENTS)])),
    ("offered", f"```json\n{CALL}\n{CALL}\n```", ("", "", [("f", ARGUMENTS), ("f", ARGUMENTS)])),
    ("offered", f"```json\n{CALL}\n```\n```json\n{CALL}\n```", ("", "", [("f", ARGUMENTS), ("f", ARGUMENTS)])),
    ("offered", f"[{CALL}, {CALL}]", ("", "", [("f", ARGUMENTS), ("f", ARGUMENTS)])),
    ("offered", f"```json\n{CALL}\n```\n\nIt tells. {CALL}", (f"It tells. {CALL}", "", [("f", ARGUMENTS)])),
    ("offered", f"{CALL}\n<tool_call>{CALL}</tool_call>", ("", "", [("f", ARGUMENTS), ("f", ARGUMENTS)])),
    ("offered", '{"parameters": {"a": 1}, "name": "get_f"}', ("", "", [("get_f", '{"a": 1}')])),
    ("offered", '{"name": "f", "arguments": "{\\"a\\": 1}"}', ("", "", [("f", '{"a": 1}')])),
    ("offered", f"So: {CALL}", (f"So: {CALL}", "", [])),
    ("offered", f"```python\n{CALL}\n```", (f"```python\n{CALL}\n```", "", [])),
    ("offered", "```json\n```", ("```json\n```", "", [])),
    ("offered", "```json", ("```json", "", [])),
    ("offered", "` is a tick", ("` is a tick", "", [])),
    ("offered", CALL[:-1], (CALL[:-1], "", [])),  # cut by its length: the continuation is unknown
    ("offered", f"{CALL}```", ("```", "", [("f", ARGUMENTS)])),
    ("offered llama3_json", '{"name": "f", "parameters": {"a": 1}}', ("", "", [("f", '{"a": 1}')])),
    ("offered llama3_json", '<|python_tag|>{"name": "x", "parameters": {}}', ("", "", [("x", "{}")])),
    ("offered llama3_json", '{"name": "f", "parameters": {"a": 1', ("", "", [("f", '{"a": 1')])),
    ("offered llama3_json", '{"name": "f", "parameters": {}, "x": 1}', ('"x": 1}', "", [("f", "{}")])),
    ("offered mistral", CALL, ("", "", [("f", ARGUMENTS)])),
    ("offered mistral", '[TOOL_CALLS]g[ARGS]{"a": 1}', ("", "", [("g", '{"a": 1}')])),
    ("offered mistral", "[1, 2]", ("[1, 2]", "", [])),
    ("qwen3 and offered", f"<think>{CALL}</think>\n\n{CALL}", ("", CALL, [("f", ARGUMENTS)])),
    *(
        (name, text, (text, "", []))
        for name in ("offered", "offered llama3_json", "offered mistral")
        for text in (
            '{"name": "Alice", "age": 3}',
            '{"name": "g", "arguments": {}}',  # none of the tools
            '{"name": "f"}',
            '{"name": "f", "age": 3}',
            '{"name": "f", "arguments": null}',
            '{"name": "f", "arguments": ["a"]}',
            '{"id": 1, "name": "f", "arguments": {}}',
            '{"arguments": {}, "parameters": {}, "name": "f"}',
            '{"arguments": {}}',
            '{"tool": {"name": "f", "arguments": {}}}',
            "{}",
            '[{"a": 1}]',
            "[]",
            '```json\n{"a": 1}\n```',
            " \n",
        )
    ),
    ("offered", '{"name": "f", "arguments": {}, "x": 1}', ('{"name": "f", "arguments": {}, "x": 1}', "", [])),
    ("offered", '{"name": "f", "arguments": {a}}', ('{"name": "f", "arguments": {a}}', "", [])),
    ("offered", '{"name": "f", "arguments": "a"}', ('{"name": "f", "arguments": "a"}', "", [])),
    ("offered", '{"name" "f" "arguments" {}}', ('{"name" "f" "arguments" {}}', "", [])),
    (
        "qwen3 and hermes",
        f"<think>a <tool_call></think>I call.<tool_call>{CALL}</tool_call>",
        ("I call.", "a <tool_call>", [("f", ARGUMENTS)]),
    ),
]


@pytest.mark.parametrize(("name", "text", "expected"), CASES)
def test_model_text_is_parsed_into_content_and_calls(name: str, text: str, expected: Read) -> None:
    assert read(name, [text]) == expected
    assert read(name, list(text)) == expected


FRAGMENTS = [
    "<tool_call>", "</tool_call>", "```json", "```", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "<think>", "</think>",
    "{", "}", "[", "]",
    '"', "\\", ",", ":", ";", " ", "\n", '"name"', '"arguments"', '"parameters"', '"f"', "f", "1", "null", "é", CALL,
]  # fmt: skip


@settings(max_examples=200)
@given(
    st.sampled_from(sorted(MAKERS)),
    st.lists(st.sampled_from(FRAGMENTS), max_size=16).map("".join),
    st.data(),
)
def test_parse_result_is_independent_of_the_split(name: str, text: str, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(name, pieces) == read(name, [text])


@given(
    st.sampled_from(["hermes", "llama3_json", "mistral", "offered", "offered llama3_json"]),
    st.lists(st.sampled_from(FRAGMENTS), max_size=12).map("".join),
)
def test_text_without_a_call_is_unchanged_content(name: str, text: str) -> None:
    content, _, calls = read(name, [text])
    if not calls:
        assert content == text


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"a":[' * 2000 + "]}" * 2000,  # no calls, each nested in the previous one
        '<tool_call>{"arguments":{"a":"' + "x" * 200_000 + '"},"b":1',
        '<tool_call>{"' + "x" * 200_000,
        '<tool_call>{"a":"' + "x" * 200_000,
        '<tool_call>{"a":' + "[" * 100_000,
        '<tool_call>{"name":' + "[" * 5_000 + "]" * 5_000 + "}",
        '{"arguments":{"a":"' + "x" * 200_000 + '"},"b":1',
        '{"name":"f","arguments":{"a":' + "[" * 50_000 + "]" * 50_000 + "},}",
        '{"name":"f","arguments":"' + "x" * 200_000,
        "[" * 200_000,
        " " * 200_000 + "x",
    ],
    ids=[
        "nested", "arguments first", "a key", "a value", "open arrays", "a name that is no string",
        "bare, arguments first", "bare and deep", "bare, a string", "bare, open arrays", "white space",
    ],
)  # fmt: skip
@pytest.mark.timeout(600)  # eleven cases of up to a second: not for `make quick`
def test_parse_time_is_linear_for_hostile_text(text: str) -> None:
    """Allow 2 s for 0.2 s of work on an idle core. Rereading or copying every piece would take minutes."""
    parser, parts = offered("hermes", ["f"]), list[Any]()

    def parse() -> None:
        for start in range(0, len(text), 4):
            parts.extend(parser.push(text[start : start + 4]))
        parts.extend(parser.finish())

    assert idle_seconds(parse) < 2
    assert all(isinstance(part, Content) for part in parts)
    assert "".join(part.text for part in parts if isinstance(part, Content)) == text


def test_deltas_are_joined_once() -> None:
    (call,) = whole_calls([ToolCallDelta(0, "", "id", "f"), *(ToolCallDelta(0, "x" * 9) for _ in range(100_000))])
    assert call == ToolCallDelta(0, "x" * 900_000, "id", "f")


def test_call_arguments_are_streamed() -> None:
    parser = MessageParser(None, hermes(), lambda number: "id")
    pieces = '<tool_call>{"name": "f", "arg', 'uments": {"a', '": 1}', "}</tool_call>"
    pushed = [parser.push(piece) for piece in pieces]
    assert [[(call.name, call.arguments) for call in delta.tool_calls] for delta in pushed] == [
        [("f", "")],
        [(None, '{"a')],
        [(None, '": 1}')],
        [],
    ]
    assert MessageDelta() == pushed[-1]
