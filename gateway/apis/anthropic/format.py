"""Anthropic's Messages format: events and bodies as bytes ready to send, and its errors. Pure.

The order of a stream's events: message_start, then for each block (thinking, text, tool_use) content_block_start,
content_block_delta ..., content_block_stop, then message_delta (stop_reason, usage), message_stop. An error is the
stream's last event. There is one choice.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from typing import Any, Literal

import msgspec

from gateway.apis.anthropic.blocks import CALL_ID_PREFIX
from gateway.errors import ContextLengthExceeded, GatewayError
from gateway.http.sse import named_event
from gateway.pipeline.choice_writer import ChoiceDelta
from gateway.pipeline.response_format import (
    NOTHING,
    ChoiceResult,
    Extra,
    ReplyHeader,
    ResponseFormat,
    UsageCount,
    json_text,
)
from gateway.text.parsers.message import ToolCallDelta
from shared.logs import request_id as log_request_id
from shared.messages import FinishReason

_ID_PREFIX = "req_"
# kind of block -> the field of its text, and the type of its deltas
_FIELDS = {
    "text": ("text", "text_delta"),
    "thinking": ("thinking", "thinking_delta"),
    "tool_use": ("partial_json", "input_json_delta"),
}
_encode = msgspec.json.encode


@dataclass(frozen=True, slots=True)
class Piece:
    kind: Literal["text", "thinking", "tool_use"]
    text: str
    begins: bool
    call: ToolCallDelta | None = None  # where a call begins

    def start(self) -> dict[str, Any]:
        """Its block before it has any text."""
        if self.kind == "tool_use":
            assert self.call is not None and self.call.id is not None
            return {"type": self.kind, "id": CALL_ID_PREFIX + self.call.id, "name": self.call.name, "input": {}}
        # A signature would prove to Anthropic's servers that the reasoning is theirs.
        return {"type": self.kind, self.kind: ""} | ({"signature": ""} if self.kind == "thinking" else {})

    def delta(self) -> dict[str, str]:
        field, kind = _FIELDS[self.kind]
        return {"type": kind, field: self.text}


class MessageBlocks:
    def __init__(self, *, shows_reasoning: bool) -> None:
        self._shows_reasoning = shows_reasoning
        self.open_kind: str | None = None

    def pieces(self, reasoning: str, tool_calls: Sequence[ToolCallDelta], text: str) -> Iterator[Piece]:
        if reasoning and self._shows_reasoning:
            yield self.piece("thinking", reasoning)
        for call in tool_calls:
            yield self.piece("tool_use", call.arguments, call)
        if text:
            yield self.piece("text", text)

    def ending(self) -> Iterator[Piece]:
        """Yield an empty block if the message has none: a message has at least one."""
        if self.open_kind is None:
            yield self.piece("text", "")

    def piece(
        self, kind: Literal["text", "thinking", "tool_use"], text: str, call: ToolCallDelta | None = None
    ) -> Piece:
        begins = kind != self.open_kind or (call is not None and call.id is not None)
        self.open_kind = kind
        return Piece(kind, text, begins, call)


class ContentBlocks:
    """The blocks of a message that is not streamed."""

    def __init__(self) -> None:
        self._blocks: list[tuple[dict[str, Any], StringIO]] = []

    def add(self, pieces: Iterable[Piece]) -> None:
        for piece in pieces:
            if piece.begins:
                self._blocks.append((piece.start(), StringIO()))
            self._blocks[-1][1].write(piece.text)

    def whole(self) -> list[dict[str, Any]]:
        return [_with_text(block, text.getvalue()) for block, text in self._blocks]


def _with_text(block: dict[str, Any], text: str) -> dict[str, Any]:
    if block["type"] == "tool_use":
        return {**block, "input": _arguments(text)}
    return {**block, block["type"]: text}


def _arguments(text: str) -> dict[str, Any]:
    """Nothing of a call that was cut: half an object is none, and the stop reason says why; nor of one without end."""
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        return {}


_ERROR_TYPES = {"server_error": "api_error"}  # the others are of one name
_STOP_REASONS = {FinishReason.LENGTH.value: "max_tokens", "tool_calls": "tool_use"}  # all else is end_turn
_TEXT_DELTA = (
    b"event: content_block_delta\n"
    b'data: {"type":"content_block_delta","index":%d,"delta":{"type":"text_delta","text":%s}}\n\n'
)


class AnthropicFormat(ResponseFormat):
    done = named_event("message_stop", {"type": "message_stop"})
    keep_alive = named_event("ping", {"type": "ping"})  # clients give up after 300 s without an event

    def __init__(self, header: ReplyHeader) -> None:
        """Start a message; `shows_reasoning` in `header.repeated` adds thinking blocks."""
        self._head = {"id": f"msg_{header.response_id}", "type": "message", "role": "assistant", "model": header.model}
        self._prompt_tokens = header.prompt_tokens
        self._stop: dict[str, Any] = {"stop_reason": None, "stop_sequence": None}
        self._blocks = MessageBlocks(shows_reasoning=bool(header.repeated.get("shows_reasoning")))
        self._content = ContentBlocks()
        self._num_begun = 0  # blocks

    def begin(self) -> bytes:
        counted = _usage(UsageCount(prompt_tokens=self._prompt_tokens))
        message = {**self._head, "content": [], **self._stop, "usage": counted}
        return named_event("message_start", {"type": "message_start", "message": message})

    def text(self, update: ChoiceDelta, usage: UsageCount | None = None, extra: Extra = None) -> bytes:
        if not update.text:
            return b""
        start = b"" if self._blocks.open_kind == "text" else self._block_start(self._blocks.piece("text", ""))
        return start + _TEXT_DELTA % (self._num_begun - 1, json_text(update.text))

    def delta(self, update: ChoiceDelta, usage: UsageCount | None = None) -> bytes:
        return self._events(self._blocks.pieces(update.reasoning, update.tool_calls, ""))

    def finish(self, update: ChoiceDelta, usage: UsageCount | None = None, extra: Extra = None) -> bytes:
        self._stop = _stop(update.finish_name, update.stop_string)
        return self._events(self._blocks.ending()) + self._block_stop()

    def usage(self, usage: UsageCount) -> bytes:
        return named_event("message_delta", {"type": "message_delta", "delta": self._stop, "usage": _usage(usage)})

    def error(self, error: GatewayError) -> bytes:
        return named_event("error", anthropic_error(error, log_request_id.get()))

    def collect(self, update: ChoiceDelta) -> ChoiceDelta:
        """Keep the order of thinking, text, and calls."""
        self._content.add(self._blocks.pieces(update.reasoning, update.tool_calls, update.text))
        return update

    def body(self, choices: Iterable[ChoiceResult], usage: UsageCount, extra: Mapping[str, Any] = NOTHING) -> bytes:
        choice = next(iter(choices))
        self._content.add(self._blocks.ending())
        stop = _stop(choice.finish_reason, choice.stop_string)
        return _encode({**self._head, "content": self._content.whole(), **stop, "usage": _usage(usage)})

    def _events(self, pieces: Iterable[Piece]) -> bytes:
        events = b""
        for piece in pieces:
            if piece.begins:
                events += self._block_start(piece)
            if piece.text:
                events += self._block_delta(piece)
        return events

    def _block_start(self, piece: Piece) -> bytes:
        before = self._block_stop() if self._num_begun else b""
        index, self._num_begun = self._num_begun, self._num_begun + 1
        start = {"type": "content_block_start", "index": index, "content_block": piece.start()}
        return before + named_event("content_block_start", start)

    def _block_delta(self, piece: Piece) -> bytes:
        delta = {"type": "content_block_delta", "index": self._num_begun - 1, "delta": piece.delta()}
        return named_event("content_block_delta", delta)

    def _block_stop(self) -> bytes:
        return named_event("content_block_stop", {"type": "content_block_stop", "index": self._num_begun - 1})


def anthropic_id(request_id: str) -> str:
    """Return the API's id of the request that logs and `x-request-id` call `request_id`."""
    return request_id if request_id.startswith(_ID_PREFIX) else _ID_PREFIX + request_id


def _message(error: GatewayError) -> str:
    """Return Anthropic's wording of context errors: Claude Code retries with fewer tokens only if it finds it."""
    if not isinstance(error, ContextLengthExceeded):
        return error.message
    if error.max_tokens and not error.is_lower_bound:
        return (
            f"input length and `max_tokens` exceed context limit: {error.prompt_tokens} + {error.max_tokens} > "
            f"{error.limit}, decrease input length or `max_tokens` and try again"
        )
    return f"prompt is too long: {error.prompt_tokens} tokens > {error.limit} maximum"


def anthropic_error(error: GatewayError, request_id: str) -> dict[str, Any]:
    """Return an error body; it also has OpenAI's `param` and `code`, which Anthropic's clients ignore."""
    kind = "request_too_large" if error.status == 413 else _ERROR_TYPES.get(error.error_type, error.error_type)
    detail = {"type": kind, "message": _message(error), "param": error.param, "code": error.code}
    return {"type": "error", "error": detail, "request_id": anthropic_id(request_id)}


def _stop(reason: str, stop_string: str | None) -> dict[str, Any]:
    if stop_string is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": stop_string}
    return {"stop_reason": _STOP_REASONS.get(reason, "end_turn"), "stop_sequence": None}


def _usage(usage: UsageCount) -> dict[str, Any]:
    """Anthropic counts what was found in a cache apart."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }
