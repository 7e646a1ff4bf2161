"""Select the parsers of a chat's answer by the model's formats and the request; ParserStage applies one.

A forced call is parsed as its grammar writes it; other calls as the model's family does. Reasoning is parsed unless a
grammar leaves no room for it.
"""

import hashlib
from collections.abc import Mapping
from functools import partial

from msgspec import structs

from gateway.pipeline.choice_writer import ChoiceDelta, Write
from gateway.pipeline.request import CompletionRequest
from gateway.text.parsers.formats import HARMONY, REASONING_FORMATS, CallFormat, ReasoningFormat
from gateway.text.parsers.harmony import Harmony
from gateway.text.parsers.message import MessageParser
from gateway.text.parsers.parts import Parser
from gateway.text.parsers.tool_calls import NamedCall, answer_or_calls_parser, listed
from gateway.text.served_model import ServedModel

_PROMPT_END_TOKENS = 32  # enough for the header of harmony, and for white space after an open tag


class ParserStage:
    """Divides the text of one choice into content, reasoning, and calls."""

    def __init__(self, parser: MessageParser, output: Write) -> None:
        self._parser = parser
        self._output = output

    def write(self, delta: ChoiceDelta, out: bytearray) -> None:
        """Pass on the delta with what the parser found in its text."""
        is_last = delta.reason is not None
        found = self._parser.push(delta.text, num_tokens=len(delta.token_ids), is_last=is_last)
        parsed = structs.replace(
            delta,
            text=found.content,
            reasoning=found.reasoning,
            tool_calls=found.tool_calls,
            called_tools=is_last and self._parser.num_calls > 0,
        )
        self._output(parsed, out)


def message_parsers(
    model: ServedModel, request: CompletionRequest, prompt_token_ids: list[int], request_id: str, first_choice: int
) -> Mapping[int, MessageParser]:
    """Return a parser for each choice of the answer to a prompt; none if the text is content as it is."""
    if not request.is_chat:
        return {}
    reasoning = _reasoning_format(model, request)
    prompt_end = ""
    if reasoning is not None:
        prompt_end = model.encoder.decode(prompt_token_ids[-_PROMPT_END_TOKENS:], skip_special_tokens=False)
    call_mark = model.calls.special_tokens[0] if request.tools is not None and request.tools.mode == "auto" else ""
    parsers = {}
    for choice in range(first_choice, first_choice + request.n):
        thoughts = None if reasoning is None else reasoning.parser(prompt_end, call_mark)
        tools = None if isinstance(thoughts, Harmony) else _tool_parser(model.calls, request)
        if thoughts is not None or tools is not None:
            parsers[choice] = MessageParser(thoughts, tools, partial(_call_id, request_id, choice))
    return parsers


def needs_special_tokens(model: ServedModel, request: CompletionRequest) -> bool:
    """Return whether a parser reads special tokens, which the text must then contain."""
    if not request.is_chat:
        return False
    reasoning = _reasoning_format(model, request)
    tokens = reasoning.special_tokens if reasoning is not None else ()
    if request.tools is not None and request.tools.mode == "auto":
        tokens = (*tokens, *model.calls.special_tokens)
    return any(map(model.encoder.has_special, tokens))


def _reasoning_format(model: ServedModel, request: CompletionRequest) -> ReasoningFormat | None:
    """Return the format of reasoning. A grammar leaves no room for it, except in harmony, whose channels it keeps."""
    if model.calls.name == HARMONY:
        return REASONING_FORMATS[HARMONY]
    return model.reasoning if request.grammar is None else None


def _tool_parser(calls: CallFormat, request: CompletionRequest) -> Parser | None:
    if request.tools is None:
        return None
    if request.tools.mode == "named":
        return NamedCall(request.tools.name)
    if request.tools.mode == "required":
        return listed()
    if request.may_answer_or_call:
        return answer_or_calls_parser(calls.in_grammar, tuple(request.tools.functions))
    return calls.parser(request.tools.schemas)


def _call_id(request_id: str, choice: int, number: int) -> str:
    """Return the id of a call, the same at every gateway; nine characters, because Mistral's templates require it."""
    return hashlib.sha256(f"{request_id}:{choice}:{number}".encode()).hexdigest()[:9]
