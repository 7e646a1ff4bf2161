"""GET /tokenizer_info, in vLLM's shape; also under /v1. Without an option of its own: it is behind the key like every
route but the probes, and tells what stands in the model's files, no path and no setting of this server.
"""

from aiohttp import web

from gateway.answer_shapes import TokenizerInfoBody
from gateway.auth.access import ACCOUNT
from gateway.errors import InvalidRequest, ModelNotFound, Unavailable
from gateway.keys import STATE
from gateway.openapi import Operation, Parameter


async def tokenizer_info(request: web.Request) -> web.Response:
    model = request.app[STATE].service(request.query.get("model"), request[ACCOUNT]).require_model()
    return web.json_response(model.tokenizer_info)


def routes() -> list[web.RouteDef]:
    return [web.get(prefix + "/tokenizer_info", tokenizer_info) for prefix in ("", "/v1")]


OPERATIONS = tuple(
    Operation(
        method="GET",
        path=prefix + "/tokenizer_info",
        summary="Special tokens and chat template of a model",
        answer=TokenizerInfoBody,
        errors=(InvalidRequest, ModelNotFound, Unavailable),
        parameters=(Parameter(name="model", where="query", description="Needed where there are several"),),
    )
    for prefix in ("", "/v1")
)
