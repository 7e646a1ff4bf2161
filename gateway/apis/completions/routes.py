"""OpenAI's text completions, and embeddings, which are refused."""

from typing import NoReturn

from aiohttp import web

from gateway.apis.completions.kinds import COMPLETION
from gateway.apis.completions.schema import CompletionBody
from gateway.apis.completions.shapes import TextCompletionBody
from gateway.errors import NotServed
from gateway.http.openapi import Operation
from gateway.http.shapes import ErrorBody
from gateway.pipeline.api import Api
from gateway.pipeline.submit import generating


async def refuse(request: web.Request) -> NoReturn:
    raise NotServed(
        "Embeddings are not supported: the models here generate text. Configure the client to send embeddings to a "
        "server of an embedding model, such as text-embeddings-inference or vLLM with --runner pooling."
    )


API = Api(
    operations=(
        generating(
            "/v1/completions",
            COMPLETION,
            "Complete texts or token ids; with `stream`, as events",
            body=CompletionBody,
            shape=TextCompletionBody,
        ),
        Operation(
            "POST",
            "/v1/embeddings",
            refuse,
            "Not supported",
            answer=ErrorBody,
            status=NotServed.status,
            uncharged="refused without reading the body",
        ),
    ),
    kinds=(COMPLETION,),
)
