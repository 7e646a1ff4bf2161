"""Requests and readers for the tests of /v1/responses. OpenAI's types check every event."""

import json
from typing import Any

import aiohttp
import pydantic
from openai.types.responses import Response, ResponseStreamEvent

from gateway.text.served_model import ServedModel
from shared.messages import FinishReason
from tests.gateway.conftest import Gateway
from tests.gateway.fake_inference import says
from tests.gateway.test_spec_types import unknown_fields

URL = "/v1/responses"
WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": True,
}
# Required in every response by the Open Responses specification and OpenAI's own, but not by the client's types.
UNTYPED = {".store", ".presence_penalty", ".frequency_penalty"}
_UNTYPED_IN_EVENTS = {f".response{field}" for field in UNTYPED} | {".name"}
_EVENT: pydantic.TypeAdapter[ResponseStreamEvent] = pydantic.TypeAdapter(ResponseStreamEvent)


def tokens_of(model: ServedModel, text: str) -> list[int]:
    return model.encoder.encode_text(text, add_special_tokens=False)


def model_says(gateway: Gateway, text: str, reason: FinishReason = FinishReason.STOP) -> int:
    """Let the model say the text token by token; return the number of tokens."""
    token_ids = tokens_of(gateway.service.require_model(), text)
    gateway.engine.script = says(*([token_id] for token_id in token_ids), reason=reason)
    return len(token_ids)


def checked_response(data: Any) -> Response:
    response = Response.model_validate(data, strict=True)
    assert set(unknown_fields(response)) == UNTYPED
    return response


def checked_events(text: str) -> list[Any]:
    """Return the events of a stream, checked: each has OpenAI's type, its name, and consecutive numbers."""
    events = []
    for block in text.split("\n\n")[:-1]:
        lines = [line for line in block.split("\n") if not line.startswith(("id: ", ":"))]
        name, data = (line.partition(": ")[2] for line in lines)
        event = _EVENT.validate_python(json.loads(data), strict=True)
        assert event.type == name and set(unknown_fields(event)) <= _UNTYPED_IN_EVENTS
        events.append(event)
    first = events[0].sequence_number if events else 0
    assert [event.sequence_number for event in events] == list(range(first, first + len(events)))
    return events


async def asked(session: aiohttp.ClientSession, **body: Any) -> Response:
    async with session.post(URL, json={"input": "hi", **body}) as reply:
        assert reply.status == 200, await reply.text()
        return checked_response(await reply.json())


async def streamed(session: aiohttp.ClientSession, **body: Any) -> list[Any]:
    async with session.post(URL, json={"input": "hi", **body, "stream": True}) as reply:
        assert reply.status == 200, await reply.text()
        return checked_events(await reply.text())
