"""What a folder of gateway/apis adds to the gateway: the object `API` of its module `routes`."""

from collections.abc import Sequence
from dataclasses import dataclass

from gateway.http.dialect import Dialect
from gateway.http.openapi import Operation
from gateway.pipeline.answer_kind import AnswerKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Api:
    """One HTTP API.

    Attributes:
        operations: Its methods and paths.
        kinds: The kinds of answers that it generates. Each parses and formats bodies of one schema.
        dialect: Its errors and headers; None: OpenAI's.
    """

    operations: Sequence[Operation]
    kinds: Sequence[AnswerKind] = ()
    dialect: Dialect | None = None
