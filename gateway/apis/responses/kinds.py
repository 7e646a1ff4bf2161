"""The kinds of answers of OpenAI's Responses API."""

from functools import partial

from gateway.apis.responses.body import ResponsesBody
from gateway.apis.responses.format import CompactionFormat, ResponsesFormat
from gateway.apis.responses.history import KIND, with_history
from gateway.apis.responses.schema import EARLIER_ITEMS, CompactionBody, parse_compaction, parse_response
from gateway.pipeline.answer_kind import AnswerKind

RESPONSE = AnswerKind(
    KIND,
    parse_response,
    ResponsesFormat,
    frozenset((*ResponsesBody.__struct_fields__, EARLIER_ITEMS)),
    complete=with_history,
)
COMPACTION = AnswerKind(
    "response.compaction",
    parse_compaction,
    CompactionFormat,
    frozenset((*CompactionBody.__struct_fields__, EARLIER_ITEMS)),
    complete=partial(with_history, kind=CompactionBody),
)
