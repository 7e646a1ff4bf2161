"""A Jinja sandbox in which a template cannot run for ever, nor make a text without end. Pure.

Templates come with model files, which are data, and are given up to 4096 messages of strangers. Jinja's sandbox keeps
them from Python's insides, not from looping. Here each turn of a loop and each call of a macro looks at a deadline, and
what is multiplied, added or written is measured. Not bounded: the memory of one call of a filter,
such as `center(10 ** 9)`.

    with limited(1.0):
        text = written(template.generate(...), MAX_TEXT_CHARS)
"""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

RENDER_SECONDS = 1.0  # chats of 4096 messages take the templates of the hub 0.03 s
MAX_TEXT_CHARS = 8 * 2**20  # four times what a request body holds
_MAX_BITS = 4096  # of a number

_deadline: ContextVar[float] = ContextVar("_deadline")


class TemplateLimit(jinja2.TemplateRuntimeError):
    """It takes too long, or makes too much."""


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(("+", "*", "**"))

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        return _Ticking().visit(tree)  # type: ignore[no-any-return]

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        _check_size(operator, left, right)
        return super().call_binop(context, operator, left, right)


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """What is rendered inside, in this thread or task, ends within about `seconds`."""
    token = _deadline.set(time.monotonic() + seconds)
    try:
        yield
    finally:
        _deadline.reset(token)


def written(pieces: Iterable[str], max_chars: int) -> str:
    """The text of a template's pieces. Raises TemplateLimit."""
    text: list[str] = []
    num_chars = 0
    for piece in pieces:
        num_chars += len(piece)
        if num_chars > max_chars:
            raise TemplateLimit(f"it writes more than {max_chars} characters")
        text.append(piece)
    return "".join(text)


def tick() -> None:
    """Called by every turn of a loop and every call of a macro."""
    if time.monotonic() > _deadline.get():
        raise TemplateLimit("it takes too long")


def measured(text: str) -> str:
    """Around every `~`."""
    if len(text) > MAX_TEXT_CHARS:
        raise TemplateLimit(f"it makes more than {MAX_TEXT_CHARS} characters")
    return text


def _check_size(operator: str, left: Any, right: Any) -> None:
    if operator == "**":
        is_large = isinstance(left, int) and isinstance(right, int) and left.bit_length() * abs(right) > _MAX_BITS
    elif operator == "*":
        is_large = _size(left) * _size(right) > MAX_TEXT_CHARS if _has_size(left) or _has_size(right) else False
    else:
        is_large = _has_size(left) and _has_size(right) and len(left) + len(right) > MAX_TEXT_CHARS
    if is_large:
        raise TemplateLimit(f"the result of {operator} is too large")


def _has_size(value: Any) -> bool:
    return isinstance(value, str | list | tuple)


def _size(value: Any) -> int:
    return len(value) if _has_size(value) else int(value)


class _Ticking(NodeTransformer):
    """Names are imported by the compiled template: no variable of a template can stand in for them."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        return _with_tick(self.generic_visit(node))

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        return _with_tick(self.generic_visit(node))

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:
        return _with_tick(self.generic_visit(node))

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        return _call("measured", self.generic_visit(node))


def _with_tick(node: Any) -> nodes.Node:
    node.body.insert(0, nodes.ExprStmt(_call("tick")))
    return node  # type: ignore[no-any-return]


def _call(function: str, *arguments: Any) -> nodes.Call:
    return nodes.Call(nodes.ImportedName(f"{__name__}.{function}"), list(arguments), [], None, None)
