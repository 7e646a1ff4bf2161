"""/v1/requests/{id}: kept answers, at any gateway. The id is that of the answer, with or without its prefix.

GET     the state, and the whole answer after its end
DELETE  cancels the request
GET     /events: its stream from the beginning, or after the event in Last-Event-ID, which EventSource sends
"""

from dataclasses import replace
from typing import Any

import msgspec
from aiohttp import web

from gateway.auth.access import ACCOUNT
from gateway.errors import GatewayError, GenerationFailed, InvalidRequest, RateLimited, RequestNotFound, Unavailable
from gateway.http.event_numbers import HEADER
from gateway.http.kept_bodies import BuiltBody
from gateway.http.openapi import EVENTS, Operation, Parameter
from gateway.http.shapes import ErrorDetail
from gateway.http.state import STATE
from gateway.pipeline.answer_kind import KINDS
from gateway.pipeline.api import Api
from gateway.pipeline.context import RequestContext, context_of
from gateway.pipeline.kept import KeptAnswer, find_answer
from gateway.pipeline.response_format import Body
from gateway.pipeline.submission import as_built, read_again, stream_again

_ERRORS = (RequestNotFound, GenerationFailed, Unavailable)


class RequestBody(msgspec.Struct, kw_only=True):
    """A kept request; `result` is the answer without `stream`, set once `state` is finished."""

    id: str
    object: str
    kind: str
    state: str  # queued | running | finished | failed | cancelled
    created: int
    detach_seconds: float
    completion_tokens: int  # generated so far
    result: msgspec.Raw | None
    error: ErrorDetail | None


async def show_request(http: web.Request) -> web.Response:
    context = context_of(http)

    async def build() -> BuiltBody:
        answer = await _find(http)
        return replace(as_built(answer, await _shown(context, answer)), has_ended=not answer.is_open)

    shared = await context.state.kept_bodies.get(context.account, ("request", http.match_info["id"]), build)
    return shared.response()


async def cancel_request(http: web.Request) -> web.Response:
    """Cancel a request; one that has ended is not changed."""
    answer = await _find(http)
    for request in answer.requests:
        await answer.service.client.submission.cancel(request)
    shown = await _shown(context_of(http), await _find(http))
    return web.Response(body=shown, content_type="application/json")


async def stream_request(http: web.Request) -> web.StreamResponse:
    context = context_of(http)
    async with context.state.kept_bodies.turn(context.account.owner_key_hash):
        answer = await _find(http)
    if not answer.kind.has_events:
        raise InvalidRequest(f"id: an answer of kind {answer.kind.name} has no events; read it as a whole.", param="id")
    return await stream_again(http, answer)


async def _find(http: web.Request) -> KeptAnswer:
    services, kinds = http.app[STATE].models, http.app[KINDS]
    return await find_answer(services, kinds, http.match_info["id"], http[ACCOUNT].owner_key_hash)


async def _shown(context: RequestContext, answer: KeptAnswer) -> bytes:
    result: Body | None = None
    error: dict[str, Any] | None = None
    if not answer.is_open:
        try:
            result = await read_again(context, answer)
        except RateLimited:
            raise
        except GatewayError as failure:
            error = failure.body()["error"]
    shown = RequestBody(
        id=answer.answer_id,
        object="request",
        kind=answer.kind.name,
        state=answer.state,
        created=answer.record.created,
        detach_seconds=answer.record.detach_seconds,
        completion_tokens=sum(part.num_tokens for part in answer.parts),
        result=None if result is None else msgspec.Raw(result),
        error=None if error is None else msgspec.convert(error, ErrorDetail),
    )
    return msgspec.json.encode(shown)


API = Api(
    operations=(
        Operation(
            "GET",
            "/v1/requests/{id}",
            show_request,
            "Retrieve a kept request: its state, and its answer after its end",
            answer=RequestBody,
            errors=_ERRORS,
            is_admitted=True,
        ),
        Operation(
            "DELETE", "/v1/requests/{id}", cancel_request, "Cancel a kept request", answer=RequestBody, errors=_ERRORS
        ),
        Operation(
            "GET",
            "/v1/requests/{id}/events",
            stream_request,
            "Stream the answer of a kept request, from the beginning or after an event",
            media=(EVENTS,),
            other_statuses=(204,),
            errors=(*_ERRORS, InvalidRequest, RateLimited),
            parameters=(
                Parameter(name=HEADER, where="header", description="Id of the last event that the client received"),
            ),
            is_admitted=True,
        ),
    )
)
