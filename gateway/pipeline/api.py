"""What a folder of gateway/apis adds to the gateway: the object `API` of its module `routes`."""

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

from aiohttp import web

from gateway.http.dialect import Dialect
from gateway.http.openapi import Operation
from gateway.pipeline.answer_kind import AnswerKind
from gateway.settings import GatewaySettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Api:
    """One HTTP API.

    Attributes:
        operations: Its methods and paths.
        kinds: The kinds of answers that it generates. Each parses and formats bodies of one schema.
        dialect: Its errors and headers; None: OpenAI's.
        is_served: Whether a gateway with these settings serves it.
        start: Adds to an application what its handlers need, and returns a context that lasts as long.
    """

    operations: Sequence[Operation]
    kinds: Sequence[AnswerKind] = ()
    dialect: Dialect | None = None
    is_served: Callable[[GatewaySettings], bool] = lambda settings: True
    start: Callable[[web.Application], Callable[[web.Application], AsyncIterator[None]]] | None = None
