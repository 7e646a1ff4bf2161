"""Which parsers read the text of an answer, by the model, its options and what was asked. Pure.

A forced call is read as its grammar writes it; other calls as the model's family does, which the chat template shows.
Where the model may answer in a form or call, the grammar of both is made here, for it depends on that family.
Thoughts are looked for wherever no grammar leaves them no room.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Protocol

from msgspec import structs

from gateway.answers.choice_progress import ChoiceUpdate
from gateway.errors import InvalidRequest
from gateway.models.model_service import ModelOptions
from gateway.parsing.answer_or_calls import answer_or_calls_parser
from gateway.parsing.bare_calls import calls_of_offered
from gateway.parsing.message import MessageParser
from gateway.parsing.parts import Parser
from gateway.parsing.reasoning import REASONING_PARSERS
from gateway.parsing.tool_calls import TOOL_CALL_PARSERS, NamedCall, listed
from gateway.requests.call_grammar import answer_or_calls
from gateway.requests.grammar_fields import AskedGrammar
from gateway.requests.openai_schema import CompletionRequest


class Encoder(Protocol):
    """What of PromptEncoder is asked."""

    @property
    def template_source(self) -> str: ...

    def has_special(self, text: str) -> bool: ...

    def special_id(self, text: str) -> int | None: ...


def message_parsers(
    options: ModelOptions, encoder: Encoder, request: CompletionRequest, request_id: str, first_choice: int
) -> Mapping[int, MessageParser]:
    """One for each choice of the answer to this prompt; none if its text is content as it is. Raises InvalidRequest."""
    if request.must_think and not options.reasoning_parser:
        raise InvalidRequest(
            "thinking: this server does not tell this model's thoughts apart; leave it out, or disable it.",
            param="thinking",
        )
    if not request.is_chat:
        return {}
    parsers = {}
    for choice in range(first_choice, first_choice + request.n):
        reasoning = REASONING_PARSERS[options.reasoning_parser]() if _may_think(options, request) else None
        tools = _tool_parser(options, encoder, request)
        if reasoning is not None or tools is not None:
            parsers[choice] = MessageParser(reasoning, tools, partial(_call_id, request_id, choice))
    return parsers


def parsed(update: ChoiceUpdate, parser: MessageParser) -> ChoiceUpdate:
    delta = parser.push(update.text, num_tokens=len(update.token_ids), is_last=update.reason is not None)
    return structs.replace(
        update,
        text=delta.content,
        reasoning=delta.reasoning,
        tool_calls=delta.tool_calls,
        called_tools=update.reason is not None and parser.num_calls > 0,
    )


def with_calls(options: ModelOptions, encoder: Encoder, request: CompletionRequest) -> CompletionRequest:
    """With calls in its grammar, where it is one of the answer alone and calls may be made."""
    if not _may_answer_or_call(request):
        return request
    assert request.answer_grammar is not None and request.tools is not None
    family = _family(options, encoder)
    both = answer_or_calls(request.answer_grammar.grammar, request.tools, family, encoder.special_id)
    return replace(request, grammar=AskedGrammar(both, "tools"))


def reads_special_mark(options: ModelOptions, encoder: Encoder, request: CompletionRequest) -> bool:
    """Whether calls begin with a special token, which the text must not leave out then."""
    if request.tools is None or request.tools.mode != "auto":
        return False
    _, mark = TOOL_CALL_PARSERS[_family(options, encoder)]
    return encoder.has_special(mark)


def _may_think(options: ModelOptions, request: CompletionRequest) -> bool:
    return bool(options.reasoning_parser) and request.grammar is None


def _may_answer_or_call(request: CompletionRequest) -> bool:
    return request.answer_grammar is not None and request.tools is not None and request.tools.mode == "auto"


def _tool_parser(options: ModelOptions, encoder: Encoder, request: CompletionRequest) -> Parser | None:
    if request.tools is None:
        return None
    if request.tools.mode == "named":
        return NamedCall(request.tools.name)
    if request.tools.mode == "required":
        return listed()
    family = _family(options, encoder)
    if _may_answer_or_call(request):
        return answer_or_calls_parser(family, tuple(request.tools.functions))
    return calls_of_offered(family, tuple(request.tools.functions))


def _family(options: ModelOptions, encoder: Encoder) -> str:
    """A template of Mistral or Llama 3 has their marks in it; everyone else is taught as Hermes was."""
    if options.tool_call_parser != "auto":
        return options.tool_call_parser
    source = encoder.template_source
    if "[TOOL_CALLS]" in source:
        return "mistral"
    return "llama3_json" if "<|python_tag|>" in source else "hermes"


def _call_id(request_id: str, choice: int, number: int) -> str:
    """The same at every gateway that gives this answer. Nine characters, for Mistral's templates take no others."""
    return hashlib.sha256(f"{request_id}:{choice}:{number}".encode()).hexdigest()[:9]
