"""POST /v1/embeddings: a clear refusal. Clients ask for it beside chat, and a 404 would look like a wrong URL.

No walk leads through it. It reads no body and knows no model.
"""

from typing import NoReturn

from aiohttp import web

from gateway.answer_shapes import ErrorBody
from gateway.errors import NotServed
from gateway.openapi import Operation


async def refuse(request: web.Request) -> NoReturn:
    raise NotServed(
        "Embeddings are not served: the models here generate text. Point the client's embeddings at a server of an "
        "embedding model (text-embeddings-inference, or vLLM with --runner pooling) and keep this one for chat."
    )


def routes() -> list[web.RouteDef]:
    return [web.post("/v1/embeddings", refuse)]


OPERATIONS = (
    Operation(
        method="POST", path="/v1/embeddings", summary="Not served here", answer=ErrorBody, status=NotServed.status
    ),
)
