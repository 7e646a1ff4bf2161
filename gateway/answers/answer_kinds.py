"""The kinds of answers, by name: how a body of each is read and how its answer is written. Pure.

A kept answer is rebuilt from the body that was stored, by any gateway and at any time: reading and writing must depend
on nothing but body and tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass

from gateway.answers.anthropic_response import AnthropicFormat
from gateway.answers.compaction_format import CompactionFormat
from gateway.answers.openai_response import ChatFormat, CompletionFormat, ResponseFormat
from gateway.answers.responses_format import ResponsesFormat
from gateway.requests.anthropic_schema import parse_messages
from gateway.requests.openai_schema import CompletionRequest, parse_chat, parse_completion
from gateway.requests.responses_compaction import parse_compaction
from gateway.requests.responses_schema import parse_response


@dataclass(frozen=True, slots=True)
class AnswerKind:
    name: str  # stored: it outlives a release
    parse: Callable[[bytes], CompletionRequest]
    make_format: Callable[..., ResponseFormat]


CHAT = AnswerKind("chat.completion", parse_chat, ChatFormat)
COMPLETION = AnswerKind("text_completion", parse_completion, CompletionFormat)
MESSAGE = AnswerKind("message", parse_messages, AnthropicFormat)
RESPONSE = AnswerKind("response", parse_response, ResponsesFormat)
COMPACTION = AnswerKind("response.compaction", parse_compaction, CompactionFormat)
KINDS = {kind.name: kind for kind in (CHAT, COMPLETION, MESSAGE, RESPONSE, COMPACTION)}
