"""Continues responses: resolves `previous_response_id` into one body with the items of both.

The stored body has all items of the conversation, so an answer can be read and continued after earlier ones expired.
Instructions are not inherited, as at OpenAI.
"""

import json
from collections.abc import Mapping
from functools import partial
from typing import Any

from gateway.apis.responses.body import ResponsesBody
from gateway.apis.responses.schema import EARLIER_ITEMS, CompactionBody
from gateway.errors import BodyTooLarge, GatewayError, InvalidRequest, RequestNotFound, Unavailable
from gateway.http.json_body import MAX_BODY_BYTES, JsonBody, check_structure, check_values
from gateway.pipeline.context import RequestContext
from gateway.pipeline.kept import KeptAnswer, find_answer
from gateway.pipeline.response_format import Body
from gateway.pipeline.submission import collect_again

PARAM = "previous_response_id"
KIND = "response"


async def find_response(context: RequestContext, response_id: str, param: str) -> KeptAnswer:
    """One that its request let be stored. Raises RequestNotFound, and as find_answer() does."""
    try:
        kept = await find_answer(context.state.models, context.kinds, response_id, context.account.owner_key_hash)
    except RequestNotFound:
        kept = None
    if kept is None or kept.kind.name != KIND or kept.body.given.get("store") is False:
        raise RequestNotFound(f"{param}: this API key has no such response, or it has expired.", param=param)
    return kept


async def with_history(
    context: RequestContext, body: JsonBody, kind: type[ResponsesBody | CompactionBody] = ResponsesBody
) -> JsonBody:
    """Return the body with the items of `previous_response_id` before its own.

    Raises:
        InvalidRequest: If there is no such response.
        BodyTooLarge: If all items together exceed the limit of a body, so that no conversation grows without bound.
    """
    if PARAM not in body.names or body.given[PARAM] is None:
        return body
    fields = await context.read(body.num_bytes, partial(body.typed, kind))
    assert fields.previous_response_id is not None
    earlier = await _items_of(context, fields.previous_response_id)
    return await context.read(None, partial(_merged, body.given, earlier))


def items_of(kept: KeptAnswer) -> list[dict[str, Any]]:
    """Return the input items of a response."""
    return _given_items(kept.body.given)


def _merged(given: Mapping[str, Any], earlier: list[dict[str, Any]]) -> JsonBody:
    merged = {**given, "input": earlier + _given_items(given), EARLIER_ITEMS: len(earlier)}
    whole = json.dumps(merged, ensure_ascii=False).encode()
    if len(whole) > MAX_BODY_BYTES:
        raise BodyTooLarge(
            f"{PARAM}: with its items the request has {len(whole)} bytes; at most {MAX_BODY_BYTES}.", param=PARAM
        )
    check_structure(whole)
    check_values([whole])
    return JsonBody(merged, len(whole))


async def _items_of(context: RequestContext, response_id: str) -> list[dict[str, Any]]:
    """Return the input and output items of a response."""
    try:
        kept = await find_response(context, response_id, PARAM)
    except RequestNotFound as error:
        raise InvalidRequest(error.message, param=PARAM, code="previous_response_not_found") from error
    if kept.state != "finished":
        raise InvalidRequest(
            f"{PARAM}: that response is {kept.state}; only one that has ended can be continued.", param=PARAM
        )
    try:
        response = await collect_again(context, kept)
    except Unavailable:
        raise
    except GatewayError as error:
        raise InvalidRequest(f"{PARAM}: that response has failed.", param=PARAM) from error
    output = await context.read(len(response), partial(_output_of, response))
    if any(item["type"] == "function_call" and item["status"] == "incomplete" for item in output):
        raise InvalidRequest(f"{PARAM}: that response was cut within the arguments of a call.", param=PARAM)
    return items_of(kept) + output


def _output_of(response: Body) -> list[dict[str, Any]]:
    return json.loads(response)["output"]  # type: ignore[no-any-return]


def _given_items(fields: Mapping[str, Any]) -> list[dict[str, Any]]:
    """`input` as a list, of a body that was checked."""
    given: str | list[dict[str, Any]] = fields.get("input") or []
    return [{"type": "message", "role": "user", "content": given}] if isinstance(given, str) else given
