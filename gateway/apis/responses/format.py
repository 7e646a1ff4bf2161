"""OpenAI's Responses API format: events and bodies as bytes ready to send. Pure.

The order of a stream's events: response.created, response.in_progress, those of each output item
(items.py), and last response.completed, .incomplete, or .failed, which contain the whole response. Each has
a sequence_number, from which a stream can be resumed. There is one choice, and no [DONE].

A compaction is a summary of a conversation: the user's items, and one item for the rest. It is not streamed; read again
as events, it is one event with the whole body.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from msgspec import structs

from gateway.apis.responses.body import wrapped
from gateway.apis.responses.items import EventWriter, OutputItems, lines_of, shown_item
from gateway.apis.responses.schema import USER_ITEMS
from gateway.apis.responses.tools import namespaced_names
from gateway.errors import GatewayError
from gateway.http.sse import error_event, event
from gateway.pipeline.choice_writer import ChoiceDelta
from gateway.pipeline.response_format import (
    NOTHING,
    Body,
    ChoiceResult,
    Extra,
    ReplyHeader,
    ResponseFormat,
    UsageCount,
    one_line,
)
from shared.messages import FinishReason, SamplingParams

ID_PREFIX = "resp_"
_CANCELLED = "request_cancelled"  # the code of the error that readers of a cancelled answer get
_STATUSES = {"running": "in_progress"}  # the others are of one name
_NOTHING_YET: dict[str, Any] = {
    "completed_at": None, "error": None, "incomplete_details": None, "output": [], "usage": None
}  # fmt: skip


class ResponsesFormat(ResponseFormat):
    repeats_all = True

    def __init__(self, header: ReplyHeader) -> None:
        self._head: dict[str, Any] = {
            "id": ID_PREFIX + header.response_id,
            "object": "response",
            "created_at": header.created,
            "model": header.model,
        }
        self._repeated = with_sampling(header.repeated, header.sampling)
        self._writer = EventWriter()
        namespaced = namespaced_names(header.repeated.get("tools", ()))
        self._output = OutputItems(header.response_id, self._writer, namespaced)
        self._is_cut = False
        self._usage: UsageCount | None = None

    def begin(self) -> bytes:
        response = self._response("in_progress")
        created = self._writer.event("response.created", response=response)
        return created + self._writer.event("response.in_progress", response=response)

    def text(self, update: ChoiceDelta, usage: UsageCount | None = None, extra: Extra = None) -> bytes:
        return self._output.say(update.text, update.logprobs)

    def delta(self, update: ChoiceDelta, usage: UsageCount | None = None) -> bytes:
        events = self._output.reason(update.reasoning) if update.reasoning else b""
        return events + b"".join(map(self._output.call, update.tool_calls))

    def finish(self, update: ChoiceDelta, usage: UsageCount | None = None, extra: Extra = None) -> bytes:
        self._output.say("", update.logprobs)
        self._is_cut = update.reason is FinishReason.LENGTH
        return b""

    def closing(self) -> bytes:
        return self._output.say_nothing() + self._output.close("incomplete" if self._is_cut else "completed")

    def usage(self, usage: UsageCount) -> bytes:
        """Keep the usage for the last event."""
        self._usage = usage
        return b""

    @property
    def done(self) -> bytes:
        kind = "response.incomplete" if self._is_cut else "response.completed"
        return self._writer.event(kind, response=self._ended())

    def error(self, error: GatewayError) -> bytes:
        """OpenAI has no event for what is cancelled: it is a failure whose response says so."""
        status = "cancelled" if error.code == _CANCELLED else "failed"
        return self._writer.event("response.failed", response=self._failed(status, error))

    def collect(self, update: ChoiceDelta) -> ChoiceDelta:
        """As a stream of it would be written."""
        self.delta(update)
        self.text(update)
        return structs.replace(update, logprobs=()) if update.logprobs else update

    def body(self, choices: Iterable[ChoiceResult], usage: UsageCount, extra: Mapping[str, Any] = NOTHING) -> Body:
        choice = next(iter(choices))
        self._is_cut = choice.finish_reason == FinishReason.LENGTH.value
        self.closing()
        self.usage(usage)
        return lines_of(self._ended())

    def unfinished(self, status: str, error: GatewayError | None = None) -> bytes:
        """`status`: queued | running | failed | cancelled."""
        return one_line(msgspec.json.encode(self._failed(_STATUSES.get(status, status), error)))

    def _ended(self) -> dict[str, Any]:
        assert self._usage is not None
        if not self._is_cut:
            completed_at = max(self._usage.ended_at, self._head["created_at"])  # by the clock of another machine
            output, usage = self._output.items, usage_object(self._usage)
            return self._response("completed", completed_at=completed_at, output=output, usage=usage)
        details = {"reason": "max_output_tokens"}
        return self._response(
            "incomplete", output=self._output.items, usage=usage_object(self._usage), incomplete_details=details
        )

    def _failed(self, status: str, error: GatewayError | None) -> dict[str, Any]:
        if error is None or status == "cancelled":
            return self._response(status)
        code = "invalid_prompt" if error.status < 500 else "server_error"  # the words that OpenAI's clients know
        return self._response(status, error={"code": code, "message": error.message})

    def _response(self, status: str, **ended: Any) -> dict[str, Any]:
        return {**self._head, "status": status, **_NOTHING_YET, **ended, **self._repeated}


def with_sampling(repeated: Mapping[str, Any], sampling: SamplingParams | None) -> dict[str, Any]:
    """Return the repeated fields, with the values in effect where the request set none."""
    left_open = [name for name in ("temperature", "top_p") if name in repeated and repeated[name] is None]
    return {**repeated, **{name: getattr(sampling, name) for name in left_open}}


def usage_object(usage: UsageCount) -> dict[str, Any]:
    """Return the usage in the Responses format; cache writes are not counted, so they are 0."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens or 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


class CompactionFormat(ResponseFormat):
    repeats_all = True

    def __init__(self, header: ReplyHeader) -> None:
        self._id = header.response_id
        self._created = header.created
        self._user_items = header.repeated[USER_ITEMS]
        self._summary: list[str] = []
        self._usage = UsageCount()

    def text(self, update: ChoiceDelta, usage: UsageCount | None = None, extra: Extra = None) -> bytes:
        self._summary.append(update.text)
        return b""

    def usage(self, usage: UsageCount) -> bytes:
        self._usage = usage
        return b""

    @property
    def done(self) -> bytes:
        return event(self._body("".join(self._summary), self._usage))

    def error(self, error: GatewayError) -> bytes:
        return error_event(error.body())

    def body(self, choices: Iterable[ChoiceResult], usage: UsageCount, extra: Mapping[str, Any] = NOTHING) -> bytes:
        choice = next(iter(choices))
        return self._body(choice.text, usage)

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
