"""A kind of answer: how a request body of it is parsed and how its answer is written.

A kept answer can be rebuilt from its stored body by any gateway at any time, so parsing and formatting must depend only
on the body and the tokens.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from gateway.http.json_body import JsonBody, decode_body
from gateway.pipeline.request import CompletionRequest
from gateway.pipeline.response_format import ResponseFormat


@dataclass(frozen=True, slots=True)
class AnswerKind:
    name: str  # stored: it outlives a release
    parse: Callable[[JsonBody], CompletionRequest]
    make_format: Callable[..., ResponseFormat]
    fields: frozenset[str]  # that a body of it can have, but for those without effect
    ids: str = ""  # the one of them that may list token ids
    # Adds to a body what it refers to. Its arguments: a RequestContext and the body.
    complete: Callable[[Any, JsonBody], Awaitable[JsonBody]] | None = None

    def decode(self, data: bytes) -> JsonBody:
        """Decode a body. Raises InvalidRequest."""
        return decode_body(data, ids=self.ids)


KINDS = web.AppKey("KINDS", Mapping[str, AnswerKind])
