"""GET /: the page in gateway/ui and its parts. Files are read once; the page loads nothing from other hosts.

The page itself contains no data. With API keys set it needs one like every other route: the browser asks for the
key as the HTTP Basic password, and sends it with every request of the page.
"""

from dataclasses import replace
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable

from aiohttp import web

from gateway.errors import UnknownUrl
from gateway.http.openapi import STATIC, Operation
from gateway.http.state import STATE

_VENDOR = "vendor/"  # scripts of other projects
_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
_HISTORY_ON, _HISTORY_OFF = b'data-history="on"', b'data-history="off"'
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
    content = _contents()["index.html"]
    if not request.app[STATE].settings.ui_history:
        content = content.replace(_HISTORY_ON, _HISTORY_OFF)
    return _response(content, _TYPES["html"])


async def show_part(request: web.Request) -> web.Response:
    return _part(request.match_info["name"])


async def show_vendored_part(request: web.Request) -> web.Response:
    return _part(_VENDOR + request.match_info["name"])


@cache
def _contents() -> dict[str, bytes]:
    root = files("gateway") / "ui"
    return {**_read(root), **{_VENDOR + name: content for name, content in _read(root / _VENDOR).items()}}


def _read(folder: Traversable) -> dict[str, bytes]:
    return {entry.name: entry.read_bytes() for entry in folder.iterdir() if entry.is_file()}


def _part(name: str) -> web.Response:
    content_type = _TYPES.get(name.rpartition(".")[2])
    if name not in _contents() or content_type is None:
        raise web.HTTPNotFound
    return _response(_contents()[name], content_type)


def _response(content: bytes, content_type: str) -> web.Response:
    return web.Response(body=content, content_type=content_type, charset="utf-8", headers=_HEADERS)


_PART = Operation(
    "GET",
    "/ui/{name}",
    show_part,
    "A file of the live page",
    media=tuple(_TYPES.values()),
    errors=(UnknownUrl,),
    uncharged=STATIC,
)
OPERATIONS = (
    Operation("GET", "/", show_page, "The live page", media=("text/html",), uncharged=STATIC),
    _PART,
    replace(
        _PART,
        path=f"/ui/{_VENDOR}{{name}}",
        handler=show_vendored_part,
        summary="A script of another project for the live page",
    ),
)
