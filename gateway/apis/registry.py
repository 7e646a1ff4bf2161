"""The kinds of answers by name: how a request body of each is parsed and how its answer is written. Pure.

A kept answer can be rebuilt from its stored body by any gateway at any time, so parsing and formatting must depend only
on the body and the tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass

from gateway.apis.anthropic.format import AnthropicFormat
from gateway.apis.anthropic.schema import MessagesBody, parse_messages
from gateway.apis.responses.body import ResponsesBody
from gateway.apis.responses.format import CompactionFormat, ResponsesFormat
from gateway.apis.responses.schema import EARLIER_ITEMS, CompactionBody, parse_compaction, parse_response
from gateway.http.json_body import JsonBody, decode_body
from gateway.pipeline.request import ChatBody, CompletionBody, CompletionRequest, parse_chat, parse_completion
from gateway.pipeline.response_format import ChatFormat, CompletionFormat, ResponseFormat


@dataclass(frozen=True, slots=True)
class AnswerKind:
    name: str  # stored: it outlives a release
    parse: Callable[[JsonBody], CompletionRequest]
    make_format: Callable[..., ResponseFormat]
    fields: frozenset[str]  # that a body of it can have, but for those without effect
    ids: str = ""  # the one of them that may list token ids

    def decode(self, data: bytes) -> JsonBody:
        """Decode a body. Raises InvalidRequest."""
        return decode_body(data, ids=self.ids)


CHAT = AnswerKind("chat.completion", parse_chat, ChatFormat, frozenset(ChatBody.__struct_fields__))
COMPLETION = AnswerKind(
    "text_completion", parse_completion, CompletionFormat, frozenset(CompletionBody.__struct_fields__), ids="prompt"
)
MESSAGE = AnswerKind("message", parse_messages, AnthropicFormat, frozenset(MessagesBody.__struct_fields__))
RESPONSE = AnswerKind(
    "response", parse_response, ResponsesFormat, frozenset((*ResponsesBody.__struct_fields__, EARLIER_ITEMS))
)
COMPACTION = AnswerKind(
    "response.compaction",
    parse_compaction,
    CompactionFormat,
    frozenset((*CompactionBody.__struct_fields__, EARLIER_ITEMS)),
)
KINDS = {kind.name: kind for kind in (CHAT, COMPLETION, MESSAGE, RESPONSE, COMPACTION)}
