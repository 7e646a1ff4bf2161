"""Which requests are answered in Anthropic's words, and the id by which its clients know them.

Around every route: middlewares.py asks it which form an error has. It knows no body.
"""

from aiohttp import web

ID_HEADER = "request-id"
_VERSION_HEADER = "anthropic-version"  # every request of Anthropic's clients has it
_ID_PREFIX = "req_"


def speaks_anthropic(request: web.Request) -> bool:
    """Paths that OpenAI's API has too are told apart by the header."""
    if request.path.startswith("/v1/messages"):
        return True
    return request.path.startswith(("/v1/models", "/models")) and _VERSION_HEADER in request.headers


def anthropic_id(request_id: str) -> str:
    """The id of a request that logs and `x-request-id` call `request_id`."""
    return request_id if request_id.startswith(_ID_PREFIX) else _ID_PREFIX + request_id
