"""Renders messages to prompt text with the model's Jinja template, including extensions that hub templates rely on.

A template comes with model files, which are data, so it runs sandboxed and limited in time and size. Jinja's sandbox
does not stop loops: here each loop iteration and each macro call checks a deadline, and results of operators and the
output are measured. Not bounded: the memory of one filter call, such as `center(10 ** 9)`. Clients cannot send
templates.

    with limited(1.0):
        text = written(template.generate(...), MAX_TEXT_CHARS)

If the template does not use `tools`, tools are described in the format of the Hermes models: tools in a system text,
earlier calls in <tool_call> tags, and results in a user's <tool_response>.
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

RENDER_SECONDS = 1.0  # hub templates take 0.03 s for a chat of 4,096 messages
MAX_TEXT_CHARS = 8 * 2**20  # four times the largest request body
_MAX_BITS = 4096  # of a power's result

_deadline: ContextVar[float] = ContextVar("_deadline")
_SHOWN_CHARS = 200  # of a template's error, which may repeat the messages
_TRIMMED = "\u2003"  # an em space: removed by `trim`, never written by templates


class TemplateLimit(jinja2.TemplateRuntimeError):
    """The template takes too long or produces too much."""


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(("+", "*", "**"))

    def compile(self, source: str | nodes.Template, *arguments: Any, **options: Any) -> Any:
        tree = self.parse(source) if isinstance(source, str) else source
        return super().compile(_Ticking().visit(tree), *arguments, **options)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "+" and {type(left), type(right)} == {str, dict}:
            # Templates like those of DeepSeek V3 and R1 add a call's arguments to text; most read them as an object.
            left, right = (item if isinstance(item, str) else _to_json(item) for item in (left, right))
        _check_size(operator, left, right)
        return super().call_binop(context, operator, left, right)


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Limit rendering inside the block, in this thread or task, to about `seconds`."""
    token = _deadline.set(time.monotonic() + seconds)
    try:
        yield
    finally:
        _deadline.reset(token)


def written(pieces: Iterable[str], max_chars: int) -> str:
    """Join the pieces of a template; raise TemplateLimit beyond `max_chars`."""
    text: list[str] = []
    num_chars = 0
    for piece in pieces:
        num_chars += len(piece)
        if num_chars > max_chars:
            raise TemplateLimit(f"it writes more than {max_chars} characters")
        text.append(piece)
    return "".join(text)


def tick() -> None:
    """Check the deadline; the compiled template calls this in each loop iteration and macro call."""
    if time.monotonic() > _deadline.get():
        raise TemplateLimit("it takes too long")


def measured(text: str) -> str:
    """Check the size of a `~` concatenation; the compiled template calls this."""
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
    """Adds checks to a template. The compiled template imports them, so no template variable can replace them."""

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
    tool_calls: list[dict[str, Any]]  # arguments as JSON values
    tool_call_id: str
    reasoning: str  # of an assistant's earlier answer, under both names that templates use
    reasoning_content: str


class TemplateOptions(TypedDict, total=False):
    """Rendering options of a chat."""

    add_generation_prompt: bool
    continue_final_message: bool
    template_kwargs: Mapping[str, Any]  # additional variables
    tools: Sequence[Mapping[str, Any]]


class ChatTemplateError(ValueError):
    """The template refuses the messages or fails; the error text may be sent to the client."""


class ChatTemplate:
    """A model's chat template. `special_tokens` (bos_token, eos_token, ...) become template variables."""

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        # Templates are written for these two settings of transformers.
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
        """Return the prompt text; raise ChatTemplateError for any failure of the template."""
        mark = None
        if continue_final_message:
            mark = _EndMark()
            messages = [*messages[:-1], mark.after(messages[-1])]
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
        except Exception as error:  # a template may raise anything, such as RecursionError
            reason = str(error)[:_SHOWN_CHARS]
            raise ChatTemplateError(f"the model's chat template refuses these messages: {reason}") from error
        return text if mark is None else mark.before(text)


class _EndMark:
    """A marker after the last message, so that the text that a template adds after it can be cut off.

    Searching for the message itself could match text after it, such as `>` in `<|im_end|>`.
    """

    def __init__(self) -> None:
        self._number = f"{secrets.randbits(64):020d}"  # clients cannot guess it, and filters do not change digits
        self._content = ""

    def after(self, message: ChatMessage) -> ChatMessage:
        """Return `message` with the marker after its content."""
        self._content = message["content"]
        return {**message, "content": f"{self._content}{self._number}{_TRIMMED}"}

    def before(self, text: str) -> str:
        """Return the text up to the marker; raise ChatTemplateError if the template changed the message."""
        before, found, after = text.rpartition(self._number)
        content = self._content.rstrip()
        if content and not after.startswith(_TRIMMED):  # the template trims: drop the white space before the marker
            before = before.removesuffix(self._content[len(content) :])
        if not found or not before.endswith((self._content.lstrip(), content.lstrip())):
            raise ChatTemplateError("cannot continue the last message: the chat template changes its text")
        return before


class _GenerationBlock(Extension):
    """Support for `{% generation %}`, which marks the assistant's text for training and has no effect here."""

    tags = {"generation"}  # noqa: RUF012  jinja2's own declaration

    def parse(self, parser: Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **_: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)  # jinja2's filter would escape HTML


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def with_tools_as_text(messages: Sequence[ChatMessage], tools: Iterable[Mapping[str, Any]]) -> list[ChatMessage]:
    """Return the chat with tools, calls, and results written as text."""
    texts = [_as_text(message) for message in messages]
    definitions = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    if not definitions:
        return texts
    instructions = _INSTRUCTIONS.format(tools=definitions)
    if texts and texts[0]["role"] == "system":
        return [ChatMessage(role="system", content=f"{texts[0]['content']}\n\n{instructions}"), *texts[1:]]
    return [ChatMessage(role="system", content=instructions), *texts]


def _as_text(message: ChatMessage) -> ChatMessage:
    if message["role"] == "tool":
        return ChatMessage(role="user", content=f"<tool_response>\n{message['content']}\n</tool_response>")
    if "tool_calls" not in message:
        return message
    functions = [json.dumps(call["function"], ensure_ascii=False) for call in message["tool_calls"]]
    calls = [f"<tool_call>\n{function}\n</tool_call>" for function in functions]
    content = "\n".join([*filter(None, [message["content"]]), *calls])
    kept = {name: value for name, value in message.items() if name != "tool_calls"}
    return ChatMessage(**{**kept, "content": content})  # type: ignore[typeddict-item]
