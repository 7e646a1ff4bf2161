"""The OpenAPI 3.1 description of the HTTP API, built from the types that the routes validate and answer with. Pure.

Each routes module has a table `OPERATIONS`: one entry per method and path, with its handler. app.py serves exactly
these, and schemathesis checks the answers of a running gateway against the description.
"""

import re
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from http import HTTPStatus
from typing import Any

import msgspec

from gateway.errors import (
    BodyTooLarge,
    DeadlineExceeded,
    Forbidden,
    GatewayError,
    GenerationFailed,
    IdempotencyKeyReused,
    InternalError,
    InvalidRequest,
    ModelNotFound,
    RateLimited,
    RequestTimeout,
    Unauthenticated,
    Unavailable,
    UnsupportedMediaType,
)
from gateway.http.event_numbers import HEADER as LAST_EVENT_ID
from gateway.http.headers import NAME_HEADER
from gateway.http.shapes import ErrorBody
from shared.version import VERSION

OPENAPI_VERSION = "3.1.0"
JSON = "application/json"
TEXT = "text/plain"
EVENTS = "text/event-stream"
STATIC = "static bytes"  # a reason not to charge a request
BODY_ERRORS: tuple[type[GatewayError], ...] = (InvalidRequest, RequestTimeout, BodyTooLarge, UnsupportedMediaType)
INFERENCE_ERRORS: tuple[type[GatewayError], ...] = (
    ModelNotFound,
    IdempotencyKeyReused,
    RateLimited,
    GenerationFailed,
    Unavailable,
    DeadlineExceeded,
)

_REFERENCE = "#/components/schemas/{name}"
_PATH_PARAMETER = re.compile(r"\{(\w+)(?::[^{}]+)?\}")  # aiohttp's `{id:.+}` is OpenAPI's `{id}`

# A stream has no schema as a whole; each of its events has one.
_MEDIA_SCHEMAS: dict[str, Any] = {TEXT: {"schema": {"type": "string"}}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A query or header parameter; path parameters are derived from the path."""

    name: str
    where: str  # query | header
    description: str
    kind: Any = str


KEEPING_PARAMETERS = (
    Parameter(name=NAME_HEADER, where="header", description="A repeat with the same key gets the same answer"),
    Parameter(
        name=LAST_EVENT_ID, where="header", description="With a repeat: id of the last event that the client received"
    ),
)
MODEL_PARAMETER = Parameter(name="model", where="query", description="Name of a model (default: all models)")


@dataclass(frozen=True, slots=True)
class Operation:
    """One method and path.

    Attributes:
        answer: The type of the JSON answer; None if there is none.
        media: Other media types of the answer.
        errors: Errors besides those that every operation can return.
    """

    method: str
    path: str
    handler: Callable[[Any], Awaitable[Any]]
    summary: str
    _: KW_ONLY
    body: Any = None
    body_media: str = JSON
    answer: Any = None
    media: tuple[str, ...] = ()
    status: int = 200
    # The same answer with another status, such as 503 for readiness.
    other_statuses: tuple[int, ...] = ()
    errors: tuple[type[GatewayError], ...] = ()
    parameters: tuple[Parameter, ...] = ()
    is_open: bool = False  # needs no API key
    error_body: Any = ErrorBody  # the shape of its errors
    uncharged: str = ""  # why it does not count as a request of its key; "": it does
    generates: bool = False  # refused for a key in debt, except with an Idempotency-Key, which may name a stored answer
    is_admitted: bool = False  # an open request: a stream, a body as long as one, or slow work

    def below(self, prefix: str) -> "Operation":
        return replace(self, path=prefix + self.path)

    @property
    def described_path(self) -> str:
        return _PATH_PARAMETER.sub(r"{\1}", self.path)


def describe(operations: Iterable[Operation]) -> dict[str, Any]:
    """Return the document of `GET /openapi.json`."""
    operations = list(operations)
    kinds = _kinds(operations)
    schemas, components = msgspec.json.schema_components(kinds, ref_template=_REFERENCE)
    schema_of = dict(zip(map(_key, kinds), schemas, strict=True))
    paths: dict[str, Any] = {}
    for operation in operations:
        paths.setdefault(operation.described_path, {})[operation.method.lower()] = _described(operation, schema_of)
    return {
        "openapi": OPENAPI_VERSION,
        "info": {"title": "Pagestream", "version": VERSION},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
        "security": [{"bearer": []}, {"header": []}, {}],  # {}: for a gateway without keys
    }


def _described(operation: Operation, schema_of: dict[str, Any]) -> dict[str, Any]:
    described: dict[str, Any] = {"summary": operation.summary, "responses": _responses(operation, schema_of)}
    if parameters := _parameters(operation, schema_of):
        described["parameters"] = parameters
    if operation.body is not None:
        content = {operation.body_media: {"schema": schema_of[_key(operation.body)]}}
        described["requestBody"] = {"required": True, "content": content}
    if operation.is_open:
        described["security"] = []
    return described


def _responses(operation: Operation, schema_of: dict[str, Any]) -> dict[str, Any]:
    content: dict[str, Any] = {media: _MEDIA_SCHEMAS.get(media, {}) for media in operation.media}
    if operation.answer is not None:
        content[JSON] = {"schema": schema_of[_key(operation.answer)]}
    responses = {}
    for status in (operation.status, *operation.other_statuses):
        responses[str(status)] = {"description": HTTPStatus(status).phrase, **({"content": content} if content else {})}
    for status in sorted({error.status for error in _errors(operation)} - {int(status) for status in responses}):
        body = {JSON: {"schema": schema_of[_key(operation.error_body)]}}
        responses[str(status)] = {"description": HTTPStatus(status).phrase, "content": body}
    return responses


def _errors(operation: Operation) -> Sequence[type[GatewayError]]:
    of_all: tuple[type[GatewayError], ...] = (InternalError,)
    if not operation.is_open:
        of_all += (Forbidden, Unauthenticated)
    return (*of_all, *(BODY_ERRORS if operation.body is not None else ()), *operation.errors)


def _parameters(operation: Operation, schema_of: dict[str, Any]) -> list[dict[str, Any]]:
    in_path = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for name in _PATH_PARAMETER.findall(operation.path)
    ]
    return in_path + [
        {
            "name": parameter.name,
            "in": parameter.where,
            "description": parameter.description,
            "schema": schema_of[_key(parameter.kind)],
        }
        for parameter in operation.parameters
    ]


def _kinds(operations: Iterable[Operation]) -> list[Any]:
    """Return every type once; a dict by name, because types of the typing module may be unhashable."""
    kinds: dict[str, Any] = {}
    for operation in operations:
        for kind in (
            operation.body,
            operation.answer,
            operation.error_body,
            *(parameter.kind for parameter in operation.parameters),
        ):
            if kind is not None:
                kinds[_key(kind)] = kind
    return list(kinds.values())


def _key(kind: Any) -> str:
    return f"{kind.__module__}.{kind.__qualname__}" if isinstance(kind, type) else repr(kind)
