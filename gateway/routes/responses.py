"""OpenAI's Responses API: responses that are made, kept, read again at any gateway, cancelled and deleted.

POST    /v1/responses
GET     /v1/responses/{id}               as it stands; with `stream` as events, from the first or after a number
DELETE  /v1/responses/{id}               forgets it; one that runs is cancelled first
POST    /v1/responses/{id}/cancel        one in the background; one that has ended stays as it was
GET     /v1/responses/{id}/input_items   what came into it, the newest first
POST    /v1/responses/input_tokens       how many tokens a response's prompt would have
POST    /v1/responses/compact            a conversation -> fewer items to go on with

A response's way in, behind the middlewares. It knows no item.
"""

from functools import partial
from typing import Literal

from aiohttp import web

from gateway.admission import unavailable
from gateway.answer_shapes import CompactedBody, DeletedResponseBody, InputTokensBody, ResponseBody
from gateway.answers.answer_kinds import COMPACTION, RESPONSE
from gateway.answers.answering import answer
from gateway.answers.kept_answers import KeptAnswer
from gateway.answers.responses_format import ID_PREFIX
from gateway.answers.responses_history import find_response, items_of, with_history
from gateway.answers.responses_output import InputItemsBody, input_items
from gateway.answers.submission import show_again, stream_again
from gateway.errors import GenerationFailed, InvalidRequest, RateLimited, RequestNotFound, Unavailable
from gateway.http.kept_bodies import BuiltBody
from gateway.http.query_fields import query_choice, query_flag, query_number
from gateway.model_service import num_prompt_tokens
from gateway.openapi import EVENTS, INFERENCE_ERRORS, Operation, Parameter, answering
from gateway.requests.responses_body import CountedBody, ResponsesBody
from gateway.requests.responses_schema import CompactionBody, parse_response
from gateway.state import context_of, received_body
from gateway.store.inference_client import StoreUnavailable

_PATH = "/v1/responses/{id}"
_MAX_NUMBER = 10**8
_MAX_ITEMS = 100
_ERRORS = (RequestNotFound, GenerationFailed, Unavailable)


async def create_response(http: web.Request) -> web.StreamResponse:
    return await answer(http, RESPONSE, with_history)


async def show_response(http: web.Request) -> web.StreamResponse:
    """A stream's last event is told in any case, so that no stream is silent."""
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

    return await context.state.kept_bodies.respond(context.account, (RESPONSE.name, http.match_info["id"]), build)


async def cancel_response(http: web.Request) -> web.Response:
    kept = await _find(http)
    if not kept.completion.background:
        raise InvalidRequest("id: a synchronous response cannot be cancelled, only one in the background.", param="id")
    return await _shown(http, await _cancelled(http, kept))


async def delete_response(http: web.Request) -> web.Response:
    kept = await _cancelled(http, await _find(http))
    if kept.state in ("queued", "running"):
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
    """As many as the same body's usage would tell."""
    context = context_of(http)
    async with received_body(http) as body:
        decoded = await context.read(len(body), partial(RESPONSE.decode, body))
        decoded = await with_history(context, decoded, CountedBody)
        count = partial(num_prompt_tokens, decoded, parse_response, context.state.models.to_read(context.account))
        return web.json_response({"object": "response.input_tokens", "input_tokens": await context.read(None, count)})


async def compact_conversation(http: web.Request) -> web.StreamResponse:
    return await answer(http, COMPACTION, partial(with_history, kind=CompactionBody))


async def _find(http: web.Request) -> KeptAnswer:
    return await find_response(context_of(http), http.match_info["id"], "id")


async def _cancelled(http: web.Request, kept: KeptAnswer) -> KeptAnswer:
    for request in kept.requests:
        await kept.service.client.submission.cancel(request)
    return await _find(http)


async def _shown(http: web.Request, kept: KeptAnswer) -> web.Response:
    shown = await show_again(context_of(http), kept)
    return web.Response(body=shown.data, content_type="application/json")


OPERATIONS = (
    answering(
        "/v1/responses",
        create_response,
        "Make a response; with `stream` as events, with `background` without waiting for it",
        body=ResponsesBody,
        answer=ResponseBody,
    ),
    Operation(
        "GET",
        _PATH,
        show_response,
        "A stored response as it stands, or its events",
        answer=ResponseBody,
        media=(EVENTS,),
        errors=(*_ERRORS, InvalidRequest, RateLimited),
        parameters=(
            Parameter(name="stream", where="query", description="As events", kind=bool),
            Parameter(name="starting_after", where="query", description="Only events behind this number", kind=int),
        ),
    ),
    Operation("DELETE", _PATH, delete_response, "Forget a stored response", answer=DeletedResponseBody, errors=_ERRORS),
    Operation(
        "POST",
        _PATH + "/cancel",
        cancel_response,
        "Cancel a response that is being made in the background",
        answer=ResponseBody,
        errors=(*_ERRORS, InvalidRequest),
    ),
    Operation(
        "GET",
        _PATH + "/input_items",
        list_input_items,
        "What came into a stored response",
        answer=InputItemsBody,
        errors=(*_ERRORS, InvalidRequest),
        parameters=(
            Parameter(name="limit", where="query", description="At most so many", kind=int),
            Parameter(name="order", where="query", description="Newest first by default", kind=Literal["asc", "desc"]),
            Parameter(name="after", where="query", description="The last item of the page before"),
        ),
    ),
    Operation(
        "POST",
        "/v1/responses/input_tokens",
        count_input_tokens,
        "How many tokens the prompt of such a response has",
        body=CountedBody,
        answer=InputTokensBody,
        errors=INFERENCE_ERRORS,
    ),
    answering(
        "/v1/responses/compact",
        compact_conversation,
        "Sum a conversation up: what its user said, and one item for the rest, to be given as input again",
        body=CompactionBody,
        answer=CompactedBody,
        media=(),
    ),
)
