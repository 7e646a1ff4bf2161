"""Ollama's formats of chats and of completions: one JSON object per line. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any

import msgspec

from gateway.errors import GatewayError
from gateway.pipeline.choice_writer import ChoiceDelta
from gateway.pipeline.response_format import (
    NOTHING,
    Body,
    ChoiceResult,
    Extra,
    ReplyHeader,
    ResponseFormat,
    UsageCount,
)
from gateway.text.parsers.message import ToolCallDelta, whole_calls

_encode = msgspec.json.encode


class ChatFormat(ResponseFormat):
    """The lines of /api/chat. A call is one line, after its end."""

    stream_headers = MappingProxyType({"Content-Type": "application/x-ndjson"})
    keep_alive = b""  # the format has no comments
    done = b""

    def __init__(self, header: ReplyHeader) -> None:
        created_at = datetime.fromtimestamp(header.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        self._head = {"model": header.model, "created_at": created_at}
        self._calls: list[ToolCallDelta] = []
        self._reason = "stop"

    def text(self, update: ChoiceDelta, usage: UsageCount | None = None, extra: Extra = None) -> bytes:
        return self._line(content=update.text)

    def delta(self, update: ChoiceDelta, usage: UsageCount | None = None) -> bytes:
        self._calls += update.tool_calls
        return self._line(content="", thinking=update.reasoning) if update.reasoning else b""

    def finish(self, update: ChoiceDelta, usage: UsageCount | None = None, extra: Extra = None) -> bytes:
        self._reason = _reason(update.finish_name)
        calls = _calls(whole_calls(self._calls))
        return self._line(content="", tool_calls=calls) if calls else b""

    def usage(self, usage: UsageCount) -> bytes:
        return self._whole({"content": ""}, self._reason, usage)

    def error(self, error: GatewayError) -> bytes:
        return _encode(error_object(error)) + b"\n"

    def body(self, choices: Iterable[ChoiceResult], usage: UsageCount, extra: Mapping[str, Any] = NOTHING) -> Body:
        choice = next(iter(choices))
        message: dict[str, Any] = {"content": choice.text}
        message |= {"thinking": choice.reasoning} if choice.reasoning else {}
        message |= {"tool_calls": _calls(choice.tool_calls)} if choice.tool_calls else {}
        return self._whole(message, _reason(choice.finish_reason), usage)

    def _line(self, **message: Any) -> bytes:
        return _encode({**self._head, **self.shown(message), "done": False}) + b"\n"

    def _whole(self, message: dict[str, Any], reason: str, usage: UsageCount) -> bytes:
        counts = {"prompt_eval_count": usage.prompt_tokens, "eval_count": usage.completion_tokens}
        return _encode({**self._head, **self.shown(message), "done": True, "done_reason": reason, **counts}) + b"\n"

    @staticmethod
    def shown(message: dict[str, Any]) -> dict[str, Any]:
        """Return the fields of a line that hold a message."""
        return {"message": {"role": "assistant", **message}}


class GenerateFormat(ChatFormat):
    """The lines of /api/generate."""

    @staticmethod
    def shown(message: dict[str, Any]) -> dict[str, Any]:
        return {"response": message["content"], **{name: value for name, value in message.items() if name != "content"}}


def error_object(error: GatewayError) -> dict[str, str]:
    return {"error": error.message, "code": error.code}


def _reason(name: str) -> str:
    return "length" if name == "length" else "stop"


def _calls(calls: Sequence[ToolCallDelta]) -> list[dict[str, Any]]:
    return [{"function": {"name": call.name, "arguments": _arguments(call.arguments)}} for call in calls]


def _arguments(text: str) -> dict[str, Any]:
    """Return the arguments of a call; none if the limit of tokens cut them."""
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError:
        return {}
