"""OpenAI's Responses API. Stored responses can be read at any gateway.

POST    /v1/responses
GET     /v1/responses/{id}               its current state; with `stream`, its events, from the first or after a number
DELETE  /v1/responses/{id}               deletes it; a running one is cancelled first
POST    /v1/responses/{id}/cancel        cancels a background response; an ended one is not changed
GET     /v1/responses/{id}/input_items   its input, newest first
POST    /v1/responses/input_tokens       counts the tokens of a response's prompt
POST    /v1/responses/compact            shortens a conversation to fewer items
"""

from functools import partial
from typing import Literal

from aiohttp import web

from gateway.apis.responses.body import CountedBody, ResponsesBody
from gateway.apis.responses.format import ID_PREFIX
from gateway.apis.responses.history import find_response, items_of, with_history
from gateway.apis.responses.items import InputItemsBody, input_items
from gateway.apis.responses.kinds import COMPACTION, RESPONSE
from gateway.apis.responses.schema import CompactionBody, parse_response
from gateway.apis.responses.shapes import CompactedBody, DeletedResponseBody, InputTokensBody, ResponseBody
from gateway.errors import GenerationFailed, InvalidRequest, RateLimited, RequestNotFound, Unavailable
from gateway.fleet import unavailable
from gateway.http.body import received_body
from gateway.http.kept_bodies import BuiltBody
from gateway.http.openapi import EVENTS, INFERENCE_ERRORS, Operation, Parameter
from gateway.http.query_fields import query_choice, query_flag, query_number
from gateway.pipeline.api import Api
from gateway.pipeline.context import context_of
from gateway.pipeline.kept import KeptAnswer
from gateway.pipeline.submission import show_again, stream_again
from gateway.pipeline.submit import generating, num_prompt_tokens
from gateway.store.store_calls import StoreUnavailable

_PATH = "/v1/responses/{id}"
_MAX_NUMBER = 10**8
_MAX_ITEMS = 100
_ERRORS = (RequestNotFound, GenerationFailed, Unavailable)


async def show_response(http: web.Request) -> web.StreamResponse:
    """Show a stored response, or stream its events; the last event is always sent, so no stream is empty."""
    is_stream = query_flag(http.query, "stream")
    number = query_number(http.query, "starting_after", 0, _MAX_NUMBER)
    if number is not None and not is_stream:
        raise InvalidRequest("starting_after: only allowed when stream is true.", param="starting_after")
    context = context_of(http)
    if is_stream:
        async with context.state.kept_bodies.turn(context.account.owner_key_hash):
            kept = await _find(http)
        return await stream_again(http, kept, num_known=None if number is None else number + 1)

    async def build() -> BuiltBody:
        return await show_again(context, await _find(http))

    shared = await context.state.kept_bodies.get(context.account, (RESPONSE.name, http.match_info["id"]), build)
    return shared.response()


async def cancel_response(http: web.Request) -> web.Response:
    kept = await _find(http)
    if not kept.completion.background:
        raise InvalidRequest("id: only a response with background=true can be cancelled.", param="id")
    return await _shown(http, await _cancelled(http, kept))


async def delete_response(http: web.Request) -> web.Response:
    kept = await _cancelled(http, await _find(http))
    if kept.is_open:
        raise unavailable("store_unavailable")
    try:
        await kept.service.client.archive.erase([request.request_id for request in kept.requests])
    except StoreUnavailable as error:
        raise unavailable("store_unavailable") from error
    return web.json_response({"id": ID_PREFIX + kept.answer_id, "object": "response", "deleted": True})


async def list_input_items(http: web.Request) -> web.Response:
    limit = query_number(http.query, "limit", 1, _MAX_ITEMS) or 20
    order = query_choice(http.query, "order", ("asc", "desc"), "desc")
    kept = await _find(http)
    page = input_items(
        items_of(kept), kept.answer_id, limit=limit, newest_first=order == "desc", after=http.query.get("after")
    )
    return web.json_response(page)


async def count_input_tokens(http: web.Request) -> web.Response:
    """Count the prompt tokens that the usage of the same request would show."""
    context = context_of(http)
    async with received_body(http) as body:
        decoded = await context.read(len(body), partial(RESPONSE.decode, body))
        decoded = await with_history(context, decoded, CountedBody)
        count = partial(num_prompt_tokens, decoded, parse_response, context.state.models.to_read(context.account))
        return web.json_response({"object": "response.input_tokens", "input_tokens": await context.read(None, count)})


async def _find(http: web.Request) -> KeptAnswer:
    return await find_response(context_of(http), http.match_info["id"], "id")


async def _cancelled(http: web.Request, kept: KeptAnswer) -> KeptAnswer:
    for request in kept.requests:
        await kept.service.client.submission.cancel(request)
    return await _find(http)


async def _shown(http: web.Request, kept: KeptAnswer) -> web.Response:
    shown = await show_again(context_of(http), kept)
    return web.Response(body=shown.data, content_type="application/json")


API = Api(
    operations=(
        generating(
            "/v1/responses",
            RESPONSE,
            "Create a response; with `stream`, as events; with `background`, without waiting for it",
            body=ResponsesBody,
            shape=ResponseBody,
        ),
        Operation(
            "GET",
            _PATH,
            show_response,
            "Retrieve a stored response, or stream its events",
            answer=ResponseBody,
            media=(EVENTS,),
            errors=(*_ERRORS, InvalidRequest, RateLimited),
            parameters=(
                Parameter(name="stream", where="query", description="Answer as events", kind=bool),
                Parameter(
                    name="starting_after", where="query", description="Only events after this sequence number", kind=int
                ),
            ),
            is_admitted=True,
        ),
        Operation(
            "DELETE", _PATH, delete_response, "Delete a stored response", answer=DeletedResponseBody, errors=_ERRORS
        ),
        Operation(
            "POST",
            _PATH + "/cancel",
            cancel_response,
            "Cancel a background response",
            answer=ResponseBody,
            errors=(*_ERRORS, InvalidRequest),
        ),
        Operation(
            "GET",
            _PATH + "/input_items",
            list_input_items,
            "List the input items of a stored response",
            answer=InputItemsBody,
            errors=(*_ERRORS, InvalidRequest),
            parameters=(
                Parameter(name="limit", where="query", description="Page size", kind=int),
                Parameter(
                    name="order",
                    where="query",
                    description="desc (default, newest first) or asc",
                    kind=Literal["asc", "desc"],
                ),
                Parameter(name="after", where="query", description="Id of the last item of the previous page"),
            ),
        ),
        Operation(
            "POST",
            "/v1/responses/input_tokens",
            count_input_tokens,
            "Count the prompt tokens of a response request",
            body=CountedBody,
            answer=InputTokensBody,
            errors=INFERENCE_ERRORS,
            is_admitted=True,
        ),
        generating(
            "/v1/responses/compact",
            COMPACTION,
            "Compact a conversation to the user's items and one summary item, to use as input again",
            body=CompactionBody,
            shape=CompactedBody,
            media=(),
        ),
    ),
    kinds=(RESPONSE, COMPACTION),
)
