"""Messages -> prompt text, by the model's own Jinja template, with what templates on the Hugging Face hub rely on.

Sandboxed, immutable and limited in time and size: a template comes with model files, which are data. Only the model's
template is ever run; a client cannot bring one. Knows no tokens.

Jinja's sandbox keeps a template from Python's insides, not from looping. Here each turn of a loop and each call of a
macro looks at a deadline, and what is multiplied, added or written is measured. Not bounded: the memory of one call of
a filter, such as `center(10 ** 9)`.

    with limited(1.0):
        text = written(template.generate(...), MAX_TEXT_CHARS)

A model without a word for tools in its template is told of them as Hermes' models were taught: the tools become a
system text, calls of earlier answers <tool_call> tags, and results a user's <tool_response>. Templates that take
`tools` do all of this themselves, and better.

A chat's way in, where its prompt is made.
"""

import json
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime
from typing import Any, NoReturn, TypedDict

import jinja2
import jinja2.meta
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

RENDER_SECONDS = 1.0  # chats of 4096 messages take the templates of the hub 0.03 s
MAX_TEXT_CHARS = 8 * 2**20  # four times what a request body holds
_MAX_BITS = 4096  # of a number

_deadline: ContextVar[float] = ContextVar("_deadline")
_SHOWN_CHARS = 200  # of what a template says: it may repeat the messages
_TRIMMED = "\u2003"  # white space to `trim`; no template writes an em space itself


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
    """Limit what is rendered inside, in this thread or task: it ends within about `seconds`."""
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


_INSTRUCTIONS = (
    "You can call these functions:\n<tools>\n{tools}\n</tools>\n"
    "To call one, answer with its name and its arguments as JSON between tags:\n"
    '<tool_call>\n{{"name": "the name", "arguments": {{}}}}\n</tool_call>'
)


class ChatMessage(TypedDict, total=False):
    role: str
    content: str
    name: str
    tool_calls: list[dict[str, Any]]  # their arguments as JSON values
    tool_call_id: str


class TemplateOptions(TypedDict, total=False):
    """The options that a chat is rendered with, beside its messages."""

    add_generation_prompt: bool
    continue_final_message: bool
    template_kwargs: Mapping[str, Any]  # more variables
    tools: Sequence[Mapping[str, Any]]


class ChatTemplateError(ValueError):
    """The template refuses these messages, or cannot be rendered; the message is fit for the client."""


class ChatTemplate:
    """`special_tokens` (bos_token, eos_token, ...) are variables of the template."""

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        # transformers' settings: templates are written for these two
        environment = LimitedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationBlock]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self._template = environment.from_string(source)
        self.source = source
        self.takes_tools = "tools" in jinja2.meta.find_undeclared_variables(environment.parse(source))
        self._special_tokens = special_tokens

    def render(
        self,
        messages: Sequence[ChatMessage],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        """`template_kwargs`: more variables. Raises ChatTemplateError, whatever the template does."""
        mark = _EndMark()
        if continue_final_message:
            messages = [*messages[:-1], mark.behind(messages[-1])]
        try:
            with limited(RENDER_SECONDS):
                pieces = self._template.generate(
                    {**(template_kwargs or {})},
                    messages=messages,
                    add_generation_prompt=add_generation_prompt,
                    tools=list(tools) or None,
                    documents=None,
                    **self._special_tokens,
                )
                text = written(pieces, MAX_TEXT_CHARS)
        except Exception as error:  # the template's own, such as RecursionError
            reason = str(error)[:_SHOWN_CHARS]
            raise ChatTemplateError(f"the model's chat template refuses these messages: {reason}") from error
        return mark.before(text) if continue_final_message else text


class _EndMark:
    """Stands behind the last message, so that what a template puts there can be cut off: the model goes on writing it.

    Looking for the message itself would find it in what stands behind it, such as `>` in `<|im_end|>`.
    """

    def __init__(self) -> None:
        self._number = f"{secrets.randbits(64):020d}"  # no client guesses it, no filter changes digits
        self._content = ""

    def behind(self, message: ChatMessage) -> ChatMessage:
        self._content = message["content"]
        return {**message, "content": f"{self._content}{self._number}{_TRIMMED}"}

    def before(self, text: str) -> str:
        """Raises ChatTemplateError unless the message is there, trimmed or not."""
        before, found, behind = text.rpartition(self._number)
        content = self._content.rstrip()
        if content and not behind.startswith(_TRIMMED):  # without the mark the white space before it goes as well
            before = before.removesuffix(self._content[len(content) :])
        if not found or not before.endswith((self._content.lstrip(), content.lstrip())):
            raise ChatTemplateError("the last message cannot be continued: the chat template changes its text")
        return before


class _GenerationBlock(Extension):
    """`{% generation %}` marks the assistant's text for training; here it only has to be let through."""

    tags = {"generation"}  # noqa: RUF012  jinja2's own declaration

    def parse(self, parser: Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **_: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)  # jinja2's own filter escapes HTML


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def told_of_tools(messages: Sequence[ChatMessage], tools: Iterable[Mapping[str, Any]]) -> list[ChatMessage]:
    """A chat without tool messages and calls, which are told in words."""
    told = [_in_words(message) for message in messages]
    definitions = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    if not definitions:
        return told
    instructions = _INSTRUCTIONS.format(tools=definitions)
    if told and told[0]["role"] == "system":
        return [ChatMessage(role="system", content=f"{told[0]['content']}\n\n{instructions}"), *told[1:]]
    return [ChatMessage(role="system", content=instructions), *told]


def _in_words(message: ChatMessage) -> ChatMessage:
    if message["role"] == "tool":
        return ChatMessage(role="user", content=f"<tool_response>\n{message['content']}\n</tool_response>")
    if "tool_calls" not in message:
        return message
    functions = [json.dumps(call["function"], ensure_ascii=False) for call in message["tool_calls"]]
    calls = [f"<tool_call>\n{function}\n</tool_call>" for function in functions]
    return ChatMessage(role=message["role"], content="\n".join([*filter(None, [message["content"]]), *calls]))
