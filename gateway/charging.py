"""Every route is charged to the account of its key before its body is read, but for UNCHARGED ones.

So a route that is added later is charged too. What a limit refuses has cost nothing; what is let in counts as a
request, also when it ends in an error.
"""

from collections.abc import Awaitable, Callable
from types import MappingProxyType

from aiohttp import web

from gateway.answers.keeping import NAME_HEADER
from gateway.auth.access import ACCOUNT, OPEN_ROUTES
from gateway.auth.charges import CHARGE, Charge
from gateway.http.route_name import UNKNOWN_ROUTE, route_name

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

# By the pattern of the route, with why.
UNCHARGED = MappingProxyType(
    dict.fromkeys(OPEN_ROUTES, "probes have no key")
    | dict.fromkeys(("/health", "/ready", "/metrics", "/version"), "for who operates it, also when a key is spent")
    | dict.fromkeys(("/v1/models", "/v1/models/{id}", "/models", "/models/{id}"), "names out of memory")
    | dict.fromkeys(("/openapi.json", "/", "/ui/{name}"), "bytes that are ready")
    | dict.fromkeys(("/v1/embeddings", UNKNOWN_ROUTE), "refused without a look at it")
)
GENERATING = frozenset(("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"))  # by POST


@web.middleware
async def charge(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Raises RateLimited."""
    route = route_name(request)
    if route in UNCHARGED:
        return await handler(request)
    # One with a name may be the repeat of one that still has its place: it takes its own once it is known to be new.
    generates = request.method == "POST" and route in GENERATING and NAME_HEADER not in request.headers
    with Charge(request[ACCOUNT], generates=generates) as request[CHARGE]:
        return await handler(request)
