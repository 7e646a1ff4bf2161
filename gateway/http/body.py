"""Reads the body of a request, with limits of size and time, before it is parsed."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import StreamReader, web

from gateway.auth.access import ACCOUNT
from gateway.errors import BodyTooLarge, InvalidJson, RequestTimeout, UnsupportedMediaType
from gateway.http.json_body import MAX_BODY_BYTES
from gateway.http.media_type import charset_of, check_encoding, media_type_of
from gateway.http.read_turns import ReadTurns
from gateway.http.state import STATE


@asynccontextmanager
async def received_body(request: web.Request) -> AsyncIterator[bytes]:
    """Read the body of a request. Its bytes count toward the key's share, from before they arrive to the context's end.

    Raises:
        UnsupportedMediaType: If it is compressed, or not JSON.
        BodyTooLarge: If it has more than MAX_BODY_BYTES.
        KeyShareExceeded: If the key would exceed its share of the bytes in flight.
        Unavailable: If all keys together would exceed the bytes in flight.
        RequestTimeout: If it does not arrive within --body-timeout-seconds.
        InvalidJson: If the connection closes before its end.
    """
    state = request.app[STATE]
    _check_media_type(request)
    length = request.content_length
    if length is not None and length > MAX_BODY_BYTES:
        raise _too_large()
    with state.bytes_in_flight.hold(request[ACCOUNT], MAX_BODY_BYTES if length is None else length) as held:
        timeout_seconds = state.settings.body_timeout_seconds
        try:
            async with asyncio.timeout(timeout_seconds):
                body = await _read(request.content, state.read_turns)
        except TimeoutError as error:
            raise RequestTimeout(f"The request body did not arrive within {timeout_seconds:g} s.") from error
        except web.RequestPayloadError as error:
            raise InvalidJson("The connection closed before the full request body arrived.") from error
        held.shrink(len(body))
        yield body


async def _read(content: StreamReader, turns: ReadTurns) -> bytes:
    """Read all bytes. `web.Request.read()` would keep a second copy as long as the request."""
    first = await turns.read(content)
    if content.at_eof():  # the usual case
        if len(first) > MAX_BODY_BYTES:
            raise _too_large()
        return first
    body = bytearray(first)
    while chunk := await turns.read(content):
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise _too_large()
    return bytes(body)


def _too_large() -> BodyTooLarge:
    return BodyTooLarge(f"The request body exceeds the limit of {MAX_BODY_BYTES} bytes.")


def _check_media_type(request: web.Request) -> None:
    check_encoding(request)
    if request.headers.get("Transfer-Encoding", "chunked").lower() != "chunked":
        raise UnsupportedMediaType("Transfer-Encoding: only chunked, or no Transfer-Encoding, is supported.")
    if "Content-Type" not in request.headers:
        return
    media_type = media_type_of(request)
    if media_type != "application/json" and not media_type.endswith("+json"):
        raise UnsupportedMediaType(f"Content-Type: expected application/json, got {media_type}.")
    if charset_of(request) not in ("utf-8", "utf8"):
        raise UnsupportedMediaType("Content-Type: expected charset utf-8, the only encoding of JSON.")
