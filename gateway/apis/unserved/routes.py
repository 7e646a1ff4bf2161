"""/v1/audio/* and /v1/images/*: 501, because models read and write text only."""

from typing import NoReturn

from aiohttp import web

from gateway.errors import NotServed
from gateway.http.openapi import Operation
from gateway.http.shapes import ErrorBody
from gateway.pipeline.api import Api

_PATHS = (
    "audio/speech", "audio/transcriptions", "audio/translations", "images/generations", "images/edits",
    "images/variations",
)  # fmt: skip


async def refuse(request: web.Request) -> NoReturn:
    raise NotServed("This server reads and writes text only.")


API = Api(
    operations=tuple(
        Operation(
            "POST", f"/v1/{path}", refuse, "Not supported",
            answer=ErrorBody, status=NotServed.status, uncharged="refused without reading the body",
        )
        for path in _PATHS
    )
)  # fmt: skip
