"""OpenAI's text completions, and embeddings, which are refused."""

from typing import NoReturn

from aiohttp import web

from gateway.apis.completions.kinds import COMPLETION
from gateway.apis.completions.schema import CompletionBody
from gateway.apis.completions.shapes import TextCompletionBody
from gateway.errors import NotServed
from gateway.http.openapi import Operation, answering
from gateway.http.shapes import ErrorBody
from gateway.pipeline.api import Api
from gateway.pipeline.submit import answer


async def create_completion(request: web.Request) -> web.StreamResponse:
    return await answer(request, COMPLETION)


async def refuse(request: web.Request) -> NoReturn:
    raise NotServed(
        "Embeddings are not supported: the models here generate text. Configure the client to send embeddings to a "
        "server of an embedding model, such as text-embeddings-inference or vLLM with --runner pooling."
    )


API = Api(
    operations=(
        answering(
            "/v1/completions",
            create_completion,
            "Complete texts or token ids; with `stream`, as events",
            body=CompletionBody,
            answer=TextCompletionBody,
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
