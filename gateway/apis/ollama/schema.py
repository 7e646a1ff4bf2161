"""The bodies of Ollama's /api/chat and /api/generate, converted to a chat body or a text completion. Pure.

Source: https://github.com/ollama/ollama/blob/main/docs/api.md.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from itertools import count
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from gateway.errors import UnsupportedParameter
from gateway.http.json_body import JsonBody
from gateway.pipeline.chat_request import ChatBody, MessageFields, request_in_words
from gateway.pipeline.fields import GenerationFields, ReasoningEffort, StopString
from gateway.pipeline.grammar import CalledFunction, JsonSchemaFormat, ResponseFormatFields, ToolCallFields, Tools
from gateway.pipeline.request import CompletionRequest, check_other_fields, common_request

LATEST = ":latest"  # clients add it to a name without a tag
_NO_EFFECT = ("keep_alive", "context")
_WORDS = (("response_format", "format"), ("max_tokens", "options.num_predict"))


class Function(msgspec.Struct):
    name: str
    arguments: dict[str, Any] = {}


class Call(msgspec.Struct):
    function: Function


class Message(msgspec.Struct):
    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    thinking: str | None = None
    tool_calls: list[Call] | None = None
    images: list[str] | None = None


class Options(msgspec.Struct):
    """Options of the model; others of Ollama's, such as num_gpu, have no effect here."""

    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Meta(ge=0, lt=2**31)] | None = None
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    num_predict: Annotated[int, Meta(ge=-2, lt=2**31)] | None = None  # -1 and -2: the rest of the context
    num_ctx: Annotated[int, Meta(ge=1, lt=2**31)] | None = None
    repeat_penalty: Annotated[float, Meta(gt=0.0, le=10.0)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2.0, le=2.0)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2.0, le=2.0)] | None = None
    stop: list[StopString] | None = None


class _Body(msgspec.Struct, kw_only=True):
    model: str
    stream: bool = True
    options: Options | None = None
    format: Literal["", "json"] | dict[str, Any] | None = None
    think: bool | ReasoningEffort | None = None


class OllamaChatBody(_Body, kw_only=True):
    messages: Annotated[list[Message], Meta(min_length=1, max_length=4096)]
    tools: Tools | None = None


class GenerateBody(_Body, kw_only=True):
    prompt: str = ""
    system: str | None = None
    raw: bool = False  # the prompt is the whole text, without a chat template
    suffix: str | None = None
    template: str | None = None
    images: list[str] | None = None


def parse_chat(body: JsonBody) -> CompletionRequest:
    """Parse a body of /api/chat; raise InvalidRequest."""
    fields = body.typed(OllamaChatBody)
    return _chat(fields, list(_messages(fields.messages)), _ignored(OllamaChatBody, body), tools=fields.tools)


def parse_generate(body: JsonBody) -> CompletionRequest:
    """Parse a body of /api/generate; raise InvalidRequest."""
    fields, ignored = body.typed(GenerateBody), _ignored(GenerateBody, body)
    for name in ("suffix", "template", "images"):
        _check_absent(getattr(fields, name), name)
    if not fields.raw:
        system = [MessageFields("system", fields.system)] if fields.system else []
        return _chat(fields, [*system, MessageFields("user", fields.prompt)], ignored)
    completion = GenerationFields(**_given(fields))
    return common_request(
        completion,
        (fields.prompt,),
        ignored,
        prompt_param="prompt",
        max_tokens_param="max_tokens",
        add_special_tokens=True,
    )


def model_name(name: str) -> str:
    return name.removesuffix(LATEST)


def _chat(fields: _Body, messages: list[MessageFields], ignored: tuple[str, ...], **more: Any) -> CompletionRequest:
    think = fields.think
    return request_in_words(
        ChatBody(
            messages=messages,
            chat_template_kwargs=None if think is None else {"enable_thinking": bool(think)},
            reasoning_effort=think if isinstance(think, str) else None,
            **_given(fields),
            **more,
        ),
        ignored,
        _WORDS,
    )


def _ignored(kind: type[msgspec.Struct], body: JsonBody) -> tuple[str, ...]:
    return check_other_fields(kind, body.given, {}, _NO_EFFECT)


def _given(fields: _Body) -> Mapping[str, Any]:
    options = fields.options or Options()
    max_tokens = options.num_predict
    return {
        "model": model_name(fields.model),
        "stream": fields.stream,
        "max_tokens": None if max_tokens is None or max_tokens < 1 else max_tokens,
        "repetition_penalty": options.repeat_penalty,
        "response_format": _format(fields.format),
        **{
            name: getattr(options, name)
            for name in (
                "temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty", "stop",
            )
        },
    }  # fmt: skip


def _messages(messages: list[Message]) -> Iterator[MessageFields]:
    """Give calls the ids that chat templates expect; Ollama has none: results follow in the order of the calls."""
    ids = map("call{:05}".format, count())  # nine characters, which Mistral's templates require
    waiting = deque[str]()  # ids of calls without a result
    for index, message in enumerate(messages):
        _check_absent(message.images, f"messages[{index}].images")
        calls = [_call(call, call_id) for call, call_id in zip(message.tool_calls or (), ids, strict=False)]
        waiting.extend(call.id for call in calls)
        answered = waiting.popleft() if message.role == "tool" and waiting else None
        yield MessageFields(
            message.role, message.content, tool_calls=calls or None, tool_call_id=answered, reasoning=message.thinking
        )


def _call(call: Call, call_id: str) -> ToolCallFields:
    arguments = msgspec.json.encode(call.function.arguments).decode()
    return ToolCallFields(id=call_id, function=CalledFunction(call.function.name, arguments))


def _check_absent(value: object, param: str) -> None:
    if value:
        raise UnsupportedParameter(f"{param}: not supported; remove it.", param=param)


def _format(asked: str | dict[str, Any] | None) -> ResponseFormatFields | None:
    if not asked:
        return None
    if isinstance(asked, str):
        return ResponseFormatFields(type="json_object")
    return ResponseFormatFields(type="json_schema", json_schema=JsonSchemaFormat(name="format", schema=asked))
