"""Bodies of POST /v1/responses/compact -> the request that has the model sum up a conversation. Pure."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from gateway.errors import MissingParameter
from gateway.requests.openai_schema import NO_EFFECT, CompletionRequest, MessageFields, check_other_fields
from gateway.requests.request_body import JsonBody
from gateway.requests.responses_body import Input, ResponsesBody
from gateway.requests.responses_schema import EARLIER_ITEMS, UNSUPPORTED, check_history, response_request

MAX_SUMMARY_TOKENS = 1024  # unless a request says more: a page, for a conversation of many
USER_ITEMS = "user_items"  # of what is repeated: they stand beside the summary
_ASK = (
    "Sum up our conversation so far for somebody who goes on with it and sees nothing else of it. Keep what was asked, "
    "what was decided and why, facts, names, numbers and results of tools, and what is still to be done. Write the "
    "summary alone."
)


class CompactionBody(msgspec.Struct, kw_only=True):
    """null is the same as absent."""

    model: str | None = None
    input: Input | None = None
    instructions: str | None = None
    previous_response_id: Annotated[str, Meta(min_length=1, max_length=100)] | None = None
    prompt_cache_key: str | None = None
    # Beyond OpenAI's, as in a response.
    max_output_tokens: Annotated[int, Meta(ge=1, lt=2**31)] | None = None
    cache_salt: Annotated[str, Meta(max_length=128)] | None = None
    priority: Annotated[int, Meta(ge=-(2**31), lt=2**31)] | None = None
    timeout_seconds: Annotated[float, Meta(gt=0.0)] | None = None
    queue_timeout_seconds: Annotated[float, Meta(gt=0.0)] | None = None


def parse_compaction(body: JsonBody) -> CompletionRequest:
    """Raises InvalidRequest."""
    fields = body.typed(CompactionBody)
    check_history(fields.previous_response_id, body.given)
    if fields.input is None:
        raise MissingParameter("Missing required parameter: input.", param="input")
    no_effect = NO_EFFECT | {EARLIER_ITEMS, "prompt_cache_retention"}
    ignored = check_other_fields(CompactionBody, body.given, UNSUPPORTED, no_effect)
    asked = ResponsesBody(store=False, **{name: getattr(fields, name) for name in CompactionBody.__struct_fields__})
    request = response_request(asked, ignored, [MessageFields("user", _ASK)])
    return replace(request, default_max_tokens=MAX_SUMMARY_TOKENS, repeated={USER_ITEMS: _user_items(body.given)})


def _user_items(given: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Of a body that was checked."""
    if isinstance(given["input"], str):
        return [{"role": "user", "content": given["input"]}]
    return [item for item in given["input"] if item.get("role") == "user"]
