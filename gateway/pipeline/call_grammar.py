"""Grammars for an answer that is either in the requested format or a list of tool calls in the family's format. Pure.

    hermes        <tool_call>{"name": ..., "arguments": {...}}</tool_call>, once per call
    llama3_json   {"name": ..., "parameters": {...}}, separated by ;, optionally after <|python_tag|>
    mistral       [TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...], or [TOOL_CALLS]name[ARGS]{...} once per call

The first token decides, and an answer with calls has nothing else; text/parsers/tool_calls.py relies on both. Markers
that are special tokens are written as token ids because no text produces them.
"""

from collections.abc import Callable, Mapping
from typing import TypeAlias

from gateway.pipeline.grammar import ToolUse, call_schema, calls_schema
from shared.grammars import json_schema_grammar, lark_grammar, lark_text, lark_token
from shared.messages import Grammar

_Rules: TypeAlias = dict[str, str | Grammar]
_NEW_LINE, _BLANK = lark_text("\n") + "?", lark_text(" ") + "?"


def answer_or_calls(answer: Grammar, tools: ToolUse, family: str, special_id: Callable[[str], int | None]) -> Grammar:
    """Return the grammar for an answer or calls.

    Args:
        answer: Grammar of the requested format.
        tools: Tools of the request.
        family: A key of GRAMMAR_FAMILIES in text/parsers/tool_calls.py.
        special_id: Function from a text to the id of the special token with that text, or None.
    """

    def mark(text: str) -> str:
        token_id = special_id(text)
        return lark_text(text) if token_id is None else lark_token(token_id)

    return lark_grammar({"start": "answer | calls", "answer": answer, **_FAMILIES[family](tools, mark)})


def _hermes(tools: ToolUse, mark: Callable[[str], str]) -> _Rules:
    return {
        "calls": f"call ({_NEW_LINE} call)*" if tools.is_parallel else "call",
        "call": f"{mark('<tool_call>')} {_NEW_LINE} object {_NEW_LINE} {mark('</tool_call>')}",
        "object": json_schema_grammar(call_schema(tools.functions)),
    }


def _llama3_json(tools: ToolUse, mark: Callable[[str], str]) -> _Rules:
    more = f"({lark_text(';')} {_BLANK} object)*" if tools.is_parallel else ""
    return {
        "calls": f"({mark('<|python_tag|>')})? object {more}",
        "object": json_schema_grammar(call_schema(tools.functions, "parameters")),
    }


def _mistral(tools: ToolUse, mark: Callable[[str], str]) -> _Rules:
    names = {f"arguments_{index}": name for index, name in enumerate(tools.functions)}
    named = " | ".join(f"{lark_text(name)} {mark('[ARGS]')} {rule}" for rule, name in names.items())
    more = f" ({mark('[TOOL_CALLS]')} named)*" if tools.is_parallel else ""
    listed = json_schema_grammar(calls_schema(tools.functions, is_parallel=tools.is_parallel))
    schemas: _Rules = {rule: json_schema_grammar(dict(tools.functions[name])) for rule, name in names.items()}
    return {
        "calls": f"{mark('[TOOL_CALLS]')} ({_BLANK} listed | named{more})",
        "listed": listed,
        "named": named,
        **schemas,
    }


_FAMILIES: Mapping[str, Callable[[ToolUse, Callable[[str], str]], _Rules]] = {
    "hermes": _hermes,
    "llama3_json": _llama3_json,
    "mistral": _mistral,
}
