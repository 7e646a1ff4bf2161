"""A request's body, read within limits of size and time, before anything is parsed."""

import asyncio

from aiohttp import web

from gateway.errors import BodyTooLarge, InvalidJson, RequestTimeout, UnsupportedMediaType
from gateway.requests.request_body import MAX_BODY_BYTES


async def read_body(request: web.Request, timeout_seconds: float) -> bytes:
    _check_media_type(request)
    if (request.content_length or 0) > MAX_BODY_BYTES:  # without waiting for it
        raise BodyTooLarge(f"The request body is larger than {MAX_BODY_BYTES} bytes.")
    try:
        async with asyncio.timeout(timeout_seconds):
            return await request.read()
    except TimeoutError as error:
        raise RequestTimeout(f"The request body did not arrive within {timeout_seconds:g} s.") from error
    except web.HTTPRequestEntityTooLarge as error:
        raise BodyTooLarge(f"The request body is larger than {MAX_BODY_BYTES} bytes.") from error
    except web.RequestPayloadError as error:
        raise InvalidJson("The request body broke off.") from error


def _check_media_type(request: web.Request) -> None:
    # A compressed body could be a thousand times larger than what the limit saw.
    if request.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise UnsupportedMediaType("Content-Encoding: request bodies are read as they are, without compression.")
    if request.headers.get("Transfer-Encoding", "chunked").lower() != "chunked":
        raise UnsupportedMediaType("Transfer-Encoding: request bodies come as they are or chunked.")
    if "Content-Type" not in request.headers:
        return
    media_type = request.content_type
    if media_type != "application/json" and not media_type.endswith("+json"):
        raise UnsupportedMediaType(f"Content-Type: expected application/json, got {media_type}.")
    if (request.charset or "utf-8").lower() not in ("utf-8", "utf8"):
        raise UnsupportedMediaType("Content-Type: JSON is UTF-8.")
