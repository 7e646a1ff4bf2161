"""Long response bodies: written in pieces, and aborted if the client reads nothing.

aiohttp writes a body at once: what the client does not read is copied into this process, tens of megabytes for an
answer with log-probabilities, and stays as long as the client likes. The request has released its place by then, so
one key could hold any number of such bodies.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from aiohttp import web

from gateway.http.open_response import PIECE_BYTES, OpenResponse, StreamWatch

# Set on a response whose body is counted elsewhere: an object that counts it for as long as it lives.
COUNTED = web.ResponseKey("counted", object)


async def write_long(
    request: web.Request,
    response: web.StreamResponse,
    watch: StreamWatch,
    hold: Callable[[int], AbstractContextManager[object]],
) -> web.StreamResponse:
    """Write the response if its body is long, and return it.

    Args:
        request: The request that is answered.
        response: Its response, not yet prepared.
        watch: Ends the connection of a client that reads nothing.
        hold: Counts bytes until they are sent; raises GatewayError where there is no room for them.

    Raises:
        ConnectionResetError: If the client has gone, or reads nothing.
    """
    body = response.body if isinstance(response, web.Response) and not response.prepared else None
    if not isinstance(body, bytes | bytearray) or len(body) <= PIECE_BYTES or request.method == "HEAD":
        return response
    written = web.StreamResponse(status=response.status, headers=response.headers)
    written.content_length = len(body)
    opened = OpenResponse(request, written, watch)
    with nullcontext() if COUNTED in response else hold(len(body)):
        await opened.open()
        try:
            await opened.end(body)
        finally:
            opened.close()
    return written
