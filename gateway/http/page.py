"""GET /: the page in gateway/ui and its parts. Files are read once; the page loads nothing from other hosts.

The page itself contains no data. With API keys set it needs one like every other route: the browser asks for the
key as the HTTP Basic password, and sends it with every request of the page.
"""

from functools import cache
from importlib.resources import files

from aiohttp import web

from gateway.errors import UnknownUrl
from gateway.http.openapi import STATIC, Operation

_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}


async def show_page(request: web.Request) -> web.Response:
    return _part("index.html")


async def show_part(request: web.Request) -> web.Response:
    return _part(request.match_info["name"])


@cache
def _contents() -> dict[str, bytes]:
    return {entry.name: entry.read_bytes() for entry in (files("gateway") / "ui").iterdir() if entry.is_file()}


def _part(name: str) -> web.Response:
    content_type = _TYPES.get(name.rpartition(".")[2])
    if name not in _contents() or content_type is None:
        raise web.HTTPNotFound
    return web.Response(body=_contents()[name], content_type=content_type, charset="utf-8", headers=_HEADERS)


OPERATIONS = (
    Operation("GET", "/", show_page, "The live page", media=("text/html",), uncharged=STATIC),
    Operation(
        "GET",
        "/ui/{name}",
        show_part,
        "A file of the live page",
        media=tuple(_TYPES.values()),
        errors=(UnknownUrl,),
        uncharged=STATIC,
    ),
)
