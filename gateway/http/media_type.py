"""The media type of a request: asked here alone, and of a short header.

aiohttp hands Content-Type to the standard library's parser of mail headers, which is quadratic: 8 kB of semicolons, as
long as a header may be, kept the event loop for 0.9 s. Of 256 characters it is 1 ms at most.

A chat's way in, before its body is read. It knows no route and no body.
"""

from aiohttp import web

from gateway.errors import UnsupportedMediaType

MAX_CHARS = 256  # a boundary, the longest of what clients send here, has 70


def media_type_of(http: web.Request) -> str:
    """Without its parameters, in lower case. Raises UnsupportedMediaType."""
    _check_length(http)
    return http.content_type


def charset_of(http: web.Request) -> str:
    """In lower case; of JSON, which says nothing, it is utf-8. Raises UnsupportedMediaType."""
    _check_length(http)
    return (http.charset or "utf-8").lower()


def _check_length(http: web.Request) -> None:
    if len(http.headers.get("Content-Type", "")) > MAX_CHARS:
        raise UnsupportedMediaType(f"Content-Type: expected at most {MAX_CHARS} characters.")
