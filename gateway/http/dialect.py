"""What an API says besides the answers of its own routes: errors, response headers, and models on shared URLs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from gateway.errors import GatewayError

Json = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """An API whose errors are not OpenAI's.

    Attributes:
        paths: Prefixes of its URLs.
        shared_paths: Prefixes of URLs that belong to it only in requests with the header `selector`.
        error: Returns the body of an error, from the error and the request id.
        headers: Returns its response headers, from the request id.
        show_model: Returns a model, from its name, the gateway's start in Unix seconds, and the context in tokens.
        list_models: Returns the list of such models, from the query.
    """

    paths: tuple[str, ...]
    shared_paths: tuple[str, ...] = ()
    selector: str = ""
    error: Callable[[GatewayError, str], Json]
    headers: Callable[[str], Mapping[str, str]] = lambda request_id: {}
    show_model: Callable[[str, int, int | None], Json] | None = None
    list_models: Callable[[Sequence[Json], Mapping[str, str]], Json] | None = None


DIALECTS = web.AppKey("DIALECTS", tuple[Dialect, ...])


def dialect_of(request: web.Request) -> Dialect | None:
    """Return the dialect of a request; None: OpenAI's."""
    for dialect in request.app[DIALECTS]:
        if request.path.startswith(dialect.paths):
            return dialect
        if dialect.selector in request.headers and request.path.startswith(dialect.shared_paths):
            return dialect
    return None
