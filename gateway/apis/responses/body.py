"""Fields of OpenAI's Responses API, and its items converted to messages of a chat. Pure.

The types validate, as in pipeline/request.py. An item of the input becomes a message or part of one:

    message                 a message; texts only
    function_call           a call in the preceding assistant message, or in a new one without text
    function_call_output    a tool message
    reasoning               the reasoning of the assistant message or call that follows
    compaction              an assistant message with the summary; the user messages just before it become one
"""

import base64
import binascii
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta

from gateway.apis.responses.tools import ResponseToolChoice, ResponseTools, flat_name
from gateway.errors import InvalidRequest, MissingParameter, UnsupportedParameter
from gateway.http.json_body import decode_object
from gateway.pipeline.chat_request import MessageFields
from gateway.pipeline.fields import ReasoningEffort, SamplingFields, Verbosity
from gateway.pipeline.grammar import CalledFunction, ToolCallFields
from shared.messages import MAX_LOGPROBS

# Clients return a summary unchanged. OpenAI encrypts it. Here it is only encoded: it contains the client's own
# conversation, any gateway of any release can read it, and no key has to be stored.
_PREFIX = "pagestream1."

ROLES = ("user", "assistant", "system", "developer")
_TEXT_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}


class PartFields(msgspec.Struct, kw_only=True):
    type: str
    text: str | None = None
    refusal: str | None = None


class ItemFields(msgspec.Struct, kw_only=True):
    """An item of any type; messages_of() checks the fields that its type needs."""

    type: str | None = None  # null means message
    role: str | None = None
    content: str | list[PartFields] | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None  # of a called function
    arguments: str | None = None
    output: str | list[PartFields] | None = None
    encrypted_content: str | None = None
    summary: list[PartFields] | None = None  # of reasoning


def messages_of(items: Sequence[ItemFields]) -> list[MessageFields]:
    """Convert items to chat messages; raise InvalidRequest."""
    messages: list[MessageFields] = []
    reasoning: str | None = None  # of the assistant's message or call that follows
    for index, item in enumerate(items):
        path = f"input[{index}]"
        before, reasoning = reasoning, None
        match item.type or "message":
            case "message":
                messages.append(_message(item, path, before))
            case "function_call":
                _add_call(messages, _call(item, path), before)
            case "function_call_output":
                content = _texts(_needed(item.output, f"{path}.output"), f"{path}.output")
                call_id = _needed(item.call_id, f"{path}.call_id")
                messages.append(MessageFields("tool", content, tool_call_id=call_id))
            case "compaction":
                _add_summary(messages, item, path)
            case "reasoning":
                reasoning = _reasoning(item) or before
            case other:
                raise UnsupportedParameter(
                    f"{path}.type: {other[:100]!r} is not supported; expected message, function_call, "
                    "function_call_output, reasoning or compaction.",
                    param=f"{path}.type",
                )
    return messages


def _message(item: ItemFields, path: str, reasoning: str | None) -> MessageFields:
    role = _needed(item.role, f"{path}.role")
    if role not in ROLES:
        raise InvalidRequest(f"{path}.role: {role[:100]!r} is not one of {', '.join(ROLES)}.", param=f"{path}.role")
    content = _texts(_needed(item.content, f"{path}.content"), f"{path}.content")
    return MessageFields(role, content, reasoning=reasoning)


def _reasoning(item: ItemFields) -> str:
    """Return the text of a reasoning item, or its summary if the text is not there."""
    parts = item.content if item.content and not isinstance(item.content, str) else item.summary
    return "\n".join(part.text for part in parts or () if part.text)


def _add_call(messages: list[MessageFields], call: ToolCallFields, reasoning: str | None) -> None:
    """Add a call to the preceding assistant message, because the calls of one answer form one message."""
    if not messages or messages[-1].role != "assistant":
        messages.append(MessageFields("assistant", None))
    messages[-1].reasoning = messages[-1].reasoning or reasoning
    messages[-1].tool_calls = [*(messages[-1].tool_calls or ()), call]


def _add_summary(messages: list[MessageFields], item: ItemFields, path: str) -> None:
    """Add a summary; merge the user messages before it, because some templates require alternating roles."""
    param = f"{path}.encrypted_content"
    try:
        summary = unwrapped(_needed(item.encrypted_content, param))
    except ValueError as error:
        raise InvalidRequest(
            f"{param}: expected content from this server's /v1/responses/compact; it is {error}.", param=param
        ) from error
    said: list[str] = []
    while messages and messages[-1].role == "user":
        said.insert(0, str(messages.pop().content))
    if said:
        messages.append(MessageFields("user", "\n\n".join(said)))
    messages.append(MessageFields("assistant", summary))


def _call(item: ItemFields, path: str) -> ToolCallFields:
    arguments = _needed(item.arguments, f"{path}.arguments")
    decode_object(arguments or "{}", f"{path}.arguments")  # checked here so that errors name this field
    function = CalledFunction(flat_name(_needed(item.name, f"{path}.name"), item.namespace), arguments)
    return ToolCallFields(id=_needed(item.call_id, f"{path}.call_id"), function=function)


def _texts(content: str | list[PartFields], path: str) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for index, part in enumerate(content):
        param = f"{path}[{index}]"
        field = _TEXT_PARTS.get(part.type)
        if field is None:
            raise UnsupportedParameter(
                f"{param}.type: {part.type[:100]!r} is not supported; expected a text part.",
                param=f"{param}.type",
            )
        texts.append(_needed(getattr(part, field), f"{param}.{field}"))
    return "\n".join(texts)


def _needed(value: Any, param: str) -> Any:
    if value is None:
        raise MissingParameter(f"Missing required parameter: {param}.", param=param)
    return value


def wrapped(summary: str) -> str:
    return _PREFIX + base64.urlsafe_b64encode(summary.encode()).decode()


def unwrapped(content: str) -> str:
    """Return the summary of wrapped(); raise ValueError for any other text."""
    if not content.startswith(_PREFIX):
        raise ValueError("not made by this server")
    try:
        return base64.b64decode(content[len(_PREFIX) :], altchars=b"-_", validate=True).decode()
    except (binascii.Error, UnicodeDecodeError) as error:
        raise ValueError("damaged") from error


_Items: TypeAlias = Annotated[list[ItemFields], Meta(min_length=1, max_length=4096)]
Input: TypeAlias = str | _Items
_MetadataKey: TypeAlias = Annotated[str, Meta(max_length=64)]
_MetadataValue: TypeAlias = Annotated[str, Meta(max_length=512)]
_Metadata: TypeAlias = Annotated[dict[_MetadataKey, _MetadataValue], Meta(max_length=16)]
# Only the logprobs have an effect: the other values concern tools that do not exist here, or encrypted reasoning.
_Include: TypeAlias = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]


class TextFormat(msgspec.Struct, kw_only=True):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class TextFields(msgspec.Struct, kw_only=True):
    format: TextFormat | None = None
    verbosity: Verbosity | None = None


class ReasoningFields(msgspec.Struct, kw_only=True):
    effort: ReasoningEffort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None


class ResponseStreamOptions(msgspec.Struct, kw_only=True):
    include_obfuscation: bool | None = None  # no effect: events are never padded


class ResponsesBody(SamplingFields, kw_only=True):
    """Body of /v1/responses; null means absent."""

    model: str | None = None
    input: Input
    instructions: str | None = None
    previous_response_id: Annotated[str, Meta(min_length=1, max_length=100)] | None = None
    max_output_tokens: Annotated[int, Meta(ge=1, lt=2**31)] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    text: TextFields | None = None
    tools: ResponseTools | None = None
    tool_choice: ResponseToolChoice | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: Annotated[int, Meta(ge=1)] | None = None  # no effect: it limits only server-side tools
    reasoning: ReasoningFields | None = None
    truncation: Literal["auto", "disabled"] | None = None
    include: list[_Include] | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    store: bool | None = None
    background: bool | None = None
    metadata: _Metadata | None = None
    user: str | None = None
    safety_identifier: str | None = None


class CountedBody(ResponsesBody, kw_only=True):
    """Body of a token count; without an input only the earlier items are counted."""

    input: Input | None = None  # type: ignore[assignment]
