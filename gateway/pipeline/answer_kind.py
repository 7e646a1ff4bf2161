"""A kind of answer: how a request body of it is parsed and how its answer is written.

A kept answer can be rebuilt from its stored body by any gateway at any time, so parsing and formatting must depend only
on the body and the tokens.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from aiohttp import web

from gateway.http.json_body import JsonBody, decode_body
from gateway.pipeline.request import CompletionRequest
from gateway.pipeline.response_format import ReplyHeader, ResponseFormat

SOME_TEXT = "."  # in place of texts that were encoded; some kinds of bodies have no empty ones
# Fields whose values are in the engine's request and in no answer.
_ENCODED = frozenset(
    (
        "chat_template_kwargs", "add_generation_prompt", "continue_final_message", "add_special_tokens",
        "logit_bias", "allowed_token_ids", "bad_words", "cache_salt",
    )
)  # fmt: skip


def stored_fields(body: type[msgspec.Struct], *others: str) -> frozenset[str]:
    """Return the fields of a body that an answer needs, and `others`."""
    return frozenset((*body.__struct_fields__, *others)) - _ENCODED


def short_messages(messages: Any, given: Mapping[str, Any]) -> Any:
    """Stand in for the messages of a chat."""
    return [{"role": "user", "content": SOME_TEXT}]


@dataclass(frozen=True, slots=True)
class AnswerKind:
    """One kind of answer.

    Attributes:
        name: Stored with kept answers, so it is never renamed.
        parse: Converts a body; raises InvalidRequest.
        format: Returns the writer of one answer.
        fields: The fields of a body that are stored with a kept answer.
        stand_ins: Shorter values for some of them, from the value and all fields: texts that were encoded.
        ids: The field that may list token ids.
        complete: Adds to a body what it refers to; its first argument is a RequestContext.
        has_events: Whether the answer can be streamed.
    """

    name: str
    parse: Callable[[JsonBody], CompletionRequest]
    format: Callable[[ReplyHeader], ResponseFormat]
    fields: frozenset[str]
    stand_ins: Mapping[str, Callable[[Any, Mapping[str, Any]], Any]]
    ids: str = ""
    complete: Callable[[Any, JsonBody], Awaitable[JsonBody]] | None = None
    has_events: bool = True

    def decode(self, data: bytes) -> JsonBody:
        """Decode a body. Raises InvalidRequest."""
        return decode_body(data, ids=self.ids)


KINDS = web.AppKey("KINDS", Mapping[str, AnswerKind])
