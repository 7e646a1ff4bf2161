"""The items of OpenAI's Responses API that a request brings -> messages of a chat. Pure.

    message                 a message; texts only
    function_call           a call of the assistant's message before it, or of one without text
    function_call_output    a tool's message
    reasoning               left out: chat templates drop the thoughts of earlier turns
    compaction              the assistant's message: a summary; what the user said right before it is one message

Does not know where items come from: those of earlier responses stand before the new ones (responses_history.py).
"""

import base64
import binascii
from collections.abc import Sequence
from typing import Any

import msgspec

from gateway.errors import InvalidRequest, MissingParameter, UnsupportedParameter
from gateway.requests.grammar_fields import CalledFunction, ToolCallFields
from gateway.requests.openai_schema import MessageFields
from gateway.requests.request_body import decode_object

# A summary that clients hand back as it is. OpenAI encrypts it. Here it is the client's own conversation, summed up by
# its own request, so it is only wrapped: any gateway of any release can read it, and no key has to be kept for it.
_PREFIX = "pagestream1."

ROLES = ("user", "assistant", "system", "developer")
_TEXT_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}


class PartFields(msgspec.Struct, kw_only=True):
    type: str
    text: str | None = None
    refusal: str | None = None


class ItemFields(msgspec.Struct, kw_only=True):
    """Of whatever type: which fields it needs is checked by type."""

    type: str | None = None  # null: a message
    role: str | None = None
    content: str | list[PartFields] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[PartFields] | None = None
    encrypted_content: str | None = None


def messages_of(items: Sequence[ItemFields]) -> list[MessageFields]:
    """Raises InvalidRequest."""
    messages: list[MessageFields] = []
    for index, item in enumerate(items):
        path = f"input[{index}]"
        match item.type or "message":
            case "message":
                messages.append(_message(item, path))
            case "function_call":
                _add_call(messages, _call(item, path))
            case "function_call_output":
                content = _texts(_needed(item.output, f"{path}.output"), f"{path}.output")
                call_id = _needed(item.call_id, f"{path}.call_id")
                messages.append(MessageFields("tool", content, tool_call_id=call_id))
            case "compaction":
                _add_summary(messages, item, path)
            case "reasoning":
                pass
            case other:
                raise UnsupportedParameter(
                    f"{path}.type: {other[:100]!r} is not supported by this server; items are message, function_call, "
                    "function_call_output, reasoning or compaction.",
                    param=f"{path}.type",
                )
    return messages


def _message(item: ItemFields, path: str) -> MessageFields:
    role = _needed(item.role, f"{path}.role")
    if role not in ROLES:
        raise InvalidRequest(f"{path}.role: {role[:100]!r} is not one of {', '.join(ROLES)}.", param=f"{path}.role")
    return MessageFields(role, _texts(_needed(item.content, f"{path}.content"), f"{path}.content"))


def _add_call(messages: list[MessageFields], call: ToolCallFields) -> None:
    """Calls of one answer are one message, with the text before them."""
    if not messages or messages[-1].role != "assistant":
        messages.append(MessageFields("assistant", None))
    messages[-1].tool_calls = [*(messages[-1].tool_calls or ()), call]


def _add_summary(messages: list[MessageFields], item: ItemFields, path: str) -> None:
    """Templates that want user and assistant by turns get them so: what the user said before it is one message."""
    param = f"{path}.encrypted_content"
    try:
        summary = unwrapped(_needed(item.encrypted_content, param))
    except ValueError as error:
        raise InvalidRequest(
            f"{param}: expected what this server's /v1/responses/compact answered; it is {error}.", param=param
        ) from error
    said: list[str] = []
    while messages and messages[-1].role == "user":
        said.insert(0, str(messages.pop().content))
    if said:
        messages.append(MessageFields("user", "\n\n".join(said)))
    messages.append(MessageFields("assistant", summary))


def _call(item: ItemFields, path: str) -> ToolCallFields:
    arguments = _needed(item.arguments, f"{path}.arguments")
    decode_object(arguments or "{}", f"{path}.arguments")  # here it has this name
    function = CalledFunction(_needed(item.name, f"{path}.name"), arguments)
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
                f"{param}.type: {part.type[:100]!r} is not supported by this server, which reads texts only.",
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
    """Raises ValueError for what is not made by wrapped()."""
    if not content.startswith(_PREFIX):
        raise ValueError("not made by this server")
    try:
        return base64.b64decode(content[len(_PREFIX) :], altchars=b"-_", validate=True).decode()
    except (binascii.Error, UnicodeDecodeError) as error:
        raise ValueError("damaged") from error
