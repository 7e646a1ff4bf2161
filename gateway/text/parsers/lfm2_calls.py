"""Parser for the tool calls of LFM2: Python calls with literals. Pure.

    <|tool_call_start|>[f(text="v", number=3), g()]<|tool_call_end|>

A call is converted when it is complete. JSON calls between the markers are read too: the model writes them if a system
prompt asks for JSON.
"""

import ast
import json
from collections.abc import Iterator
from typing import Any

from gateway.text.parsers.parts import Arguments, CallBegins, Content, Part, StepParser
from gateway.text.parsers.tool_calls import MarkedCalls

MARK, END = "<|tool_call_start|>", "<|tool_call_end|>"
_MAX_CHARS = 2**18  # of all calls between two markers; a longer text is content


class Lfm2Calls(StepParser):
    def __init__(self) -> None:
        super().__init__(self._in_text)
        self._calls: list[str] = []  # pieces since the marker
        self._num_chars = 0

    def finish(self) -> Iterator[Part]:
        calls = "".join([*self._calls, self._buffer])
        if self._step == self._in_calls:
            yield from self._called(calls, MARK + calls)
        else:
            yield Content(self._buffer)

    def _in_text(self) -> Iterator[Part]:
        before, mark = self._text_before((MARK,))
        yield Content(before)
        if mark:
            self._calls, self._num_chars, self._step = [], 0, self._in_calls

    def _in_calls(self) -> Iterator[Part]:
        before, end = self._text_before((END,))
        self._calls.append(before)
        self._num_chars += len(before)
        if end:
            calls = "".join(self._calls)
            self._after_space(self._in_text)
            yield from self._called(calls, MARK + calls + END)
        elif self._num_chars > _MAX_CHARS:
            yield Content(MARK + "".join(self._calls))
            self._step = self._in_text

    def _called(self, calls: str, raw: str) -> Iterator[Part]:
        if calls.lstrip().lstrip("[").lstrip().startswith("{"):
            json_calls = MarkedCalls(MARK, END)
            yield from json_calls.push(raw)
            yield from json_calls.finish()
            return
        read = _python_calls(calls)
        if not read:
            yield Content(raw)
        for name, arguments in read:
            yield CallBegins(name)
            yield Arguments(arguments)


def _python_calls(text: str) -> list[tuple[str, str]]:
    """Return (name, JSON arguments) of each call; empty if the text has anything but calls with literals."""
    text = text.strip()
    try:
        tree = ast.parse(text if text.startswith("[") else f"[{text}]", mode="eval").body
        elements = tree.elts if isinstance(tree, ast.List) else []
        return [_call(element) for element in elements]
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        return []


def _call(node: ast.expr) -> tuple[str, str]:
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("not a call with named arguments")
    arguments: dict[str, Any] = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise ValueError("** is no argument")
        arguments[keyword.arg] = _literal(keyword.value)
    return ast.unparse(node.func), json.dumps(arguments, ensure_ascii=False, allow_nan=False)


def _literal(node: ast.expr) -> Any:
    """Return the value of a literal; `true`, `false` and `null` count as such."""
    names = {"true": True, "false": False, "null": None}
    if isinstance(node, ast.Name) and node.id in names:
        return names[node.id]
    if isinstance(node, ast.List):
        return [_literal(element) for element in node.elts]
    if isinstance(node, ast.Dict):
        keys = [ast.literal_eval(key) if key is not None else None for key in node.keys]
        return {str(key): _literal(value) for key, value in zip(keys, node.values, strict=True)}
    return ast.literal_eval(node)
