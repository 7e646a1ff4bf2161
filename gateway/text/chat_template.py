"""Messages -> prompt text, by the model's own Jinja template, with what templates on the Hugging Face hub rely on.

Sandboxed, immutable and limited in time and size: a template comes with model files, which are data. Only the model's
template is ever run; a client cannot bring one. Knows no tokens.
"""

import json
import secrets
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn, TypedDict

import jinja2
import jinja2.meta
from jinja2.ext import Extension
from jinja2.parser import Parser

from gateway.text.template_limits import MAX_TEXT_CHARS, RENDER_SECONDS, LimitedEnvironment, limited, written

_SHOWN_CHARS = 200  # of what a template says: it may repeat the messages
_TRIMMED = "\u2003"  # white space to `trim`; no template writes an em space itself


class ChatMessage(TypedDict, total=False):
    role: str
    content: str
    name: str
    tool_calls: list[dict[str, Any]]  # their arguments as JSON values
    tool_call_id: str


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
