"""A summary of a conversation -> the body of a compaction: what its user said, and an item for all the rest. Pure.

It is not streamed. Read again as events, as any kept answer can be, it is the one event that has the whole body.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from gateway.answers.openai_response import NOTHING, ChoiceResult, UsageCount, one_line
from gateway.answers.responses_format import ID_PREFIX, usage_object
from gateway.answers.responses_input import shown_item
from gateway.errors import GatewayError
from gateway.http.sse import error_event, event
from gateway.parsing.message import ToolCallDelta
from gateway.requests.responses_compaction import USER_ITEMS
from gateway.requests.responses_items import wrapped
from gateway.text.logprobs import LogprobEntry


class CompactionFormat:
    prompt_in_choice = False
    repeats_all = True

    def __init__(
        self,
        response_id: str,
        model: str,
        *,
        created: int | None = None,
        repeated: Mapping[str, Any] = NOTHING,
        **_others: Any,
    ) -> None:
        """`repeated`: the items of the conversation's user."""
        self._id = response_id
        self._created = int(time.time()) if created is None else created
        self._user_items = repeated[USER_ITEMS]
        self._summary: list[str] = []
        self._usage = UsageCount()

    def begin(self) -> bytes:
        return b""

    def first(self, index: int, extra: Mapping[str, Any] = NOTHING, usage: UsageCount | None = None) -> bytes:
        return b""

    def text(
        self,
        index: int,
        text: str,
        usage: UsageCount | None = None,
        logprobs: Sequence[LogprobEntry] = (),
        extra: Mapping[str, Any] | None = None,
    ) -> bytes:
        self._summary.append(text)
        return b""

    def delta(
        self, index: int, reasoning: str, tool_calls: Sequence[ToolCallDelta], usage: UsageCount | None = None
    ) -> bytes:
        return b""

    def finish(self, index: int, reason: str, stop_string: str | None = None, **_chunks: Any) -> bytes:
        return b""

    def closing(self) -> bytes:
        return b""

    def usage(self, usage: UsageCount) -> bytes:
        self._usage = usage
        return b""

    @property
    def done(self) -> bytes:
        return event(self._body("".join(self._summary), self._usage))

    def error(self, error: GatewayError) -> bytes:
        return error_event(error.body())

    def body(self, choices: list[ChoiceResult], usage: UsageCount, extra: Mapping[str, Any] = NOTHING) -> bytes:
        (choice,) = choices
        return self._body(choice.text, usage)

    def unfinished(self, status: str, error: GatewayError | None = None) -> bytes:
        raise AssertionError("never in the background")

    def _body(self, summary: str, usage: UsageCount) -> bytes:
        kept = [shown_item(item, f"{self._id}i{index:04x}") for index, item in enumerate(self._user_items)]
        compaction = {"id": f"cmp_{self._id}", "type": "compaction", "encrypted_content": wrapped(summary.strip())}
        return one_line(
            msgspec.json.encode(
                {
                    "id": ID_PREFIX + self._id,
                    "object": "response.compaction",
                    "created_at": self._created,
                    "output": [*kept, compaction],
                    "usage": usage_object(usage),
                }
            )
        )
