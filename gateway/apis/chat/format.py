"""The format of chat completions: chunks and bodies. Pure."""

from collections.abc import Iterable, Mapping
from typing import Any

from gateway.pipeline.choice_writer import ChoiceDelta
from gateway.pipeline.response_format import NO_PROMPT, NOTHING, Body, ChoiceResult, ChunkFormat, UsageCount
from gateway.text.logprobs import chat_logprobs
from gateway.text.parsers.message import ToolCallDelta


class ChatFormat(ChunkFormat):
    chunk_object = "chat.completion.chunk"
    body_object = "chat.completion"
    id_prefix = "chatcmpl-"
    before_text = '"delta":{"content":'
    after_text = '},"logprobs":null,"finish_reason":null}'

    def first(self, index: int, extra: Mapping[str, Any] = NOTHING, usage: UsageCount | None = None) -> bytes:
        delta = {"role": "assistant", "content": ""}
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        return self._chunk([choice], None if usage is None else usage.as_object(), extra)

    def delta(self, update: ChoiceDelta, usage: UsageCount | None = None) -> bytes:
        delta = _reasoning(update.reasoning)
        if update.tool_calls:
            delta |= {"tool_calls": [_tool_call_delta(call) for call in update.tool_calls]}
        choice = {"index": update.index, "delta": delta, "logprobs": None, "finish_reason": None}
        return self._chunk([choice], None if usage is None else usage.as_object())

    def body(self, choices: Iterable[ChoiceResult], usage: UsageCount, extra: Mapping[str, Any] = NOTHING) -> Body:
        answers = (self._choice(choice, message=_message(choice)) for choice in choices)
        return self._body(answers, usage, {**NO_PROMPT, **extra})

    logprobs = staticmethod(chat_logprobs)

    @staticmethod
    def last_content(text: str) -> dict[str, Any]:
        return {"delta": {"content": text} if text else {}}


def _message(choice: ChoiceResult) -> dict[str, Any]:
    """No content beside calls is null, as OpenAI has it."""
    message = {"role": "assistant", "content": choice.text or (None if choice.tool_calls else ""), "refusal": None}
    message |= _reasoning(choice.reasoning)
    if choice.tool_calls:
        calls = ({"id": call.id, "type": "function", "function": _function(call)} for call in choice.tool_calls)
        return {**message, "tool_calls": list(calls)}
    return message


def _reasoning(text: str) -> dict[str, Any]:
    """Return both keys: `reasoning` (vLLM since 0.16) and `reasoning_content` (DeepSeek's)."""
    return {"reasoning": text, "reasoning_content": text} if text else {}


def _tool_call_delta(call: ToolCallDelta) -> dict[str, Any]:
    if call.id is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    return {"index": call.index, "id": call.id, "type": "function", "function": _function(call)}


def _function(call: ToolCallDelta) -> dict[str, str | None]:
    return {"name": call.name, "arguments": call.arguments}
