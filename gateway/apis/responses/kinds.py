"""The kinds of answers of OpenAI's Responses API."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from gateway.apis.responses.body import ResponsesBody
from gateway.apis.responses.format import CompactionFormat, ResponsesFormat
from gateway.apis.responses.history import KIND, with_history
from gateway.apis.responses.schema import EARLIER_ITEMS, CompactionBody, parse_compaction, parse_response
from gateway.pipeline.answer_kind import SOME_TEXT, AnswerKind, stored_fields


def _input(items: Any, given: Mapping[str, Any]) -> Any:
    """Keep the input, which is listed and continued, unless the request says `store: false`."""
    return SOME_TEXT if given.get("store") is False else items


RESPONSE = AnswerKind(
    KIND,
    parse_response,
    ResponsesFormat,
    stored_fields(ResponsesBody, EARLIER_ITEMS),
    {"input": _input},
    complete=with_history,
)
COMPACTION = AnswerKind(
    "response.compaction",
    parse_compaction,
    CompactionFormat,
    stored_fields(CompactionBody, EARLIER_ITEMS),
    {"input": _input},
    complete=partial(with_history, kind=CompactionBody),
)
