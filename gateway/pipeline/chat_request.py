"""A chat body, the form to which the APIs of conversations convert theirs, and its CompletionRequest. Pure.

msgspec validates the types and names the path of an error.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta, structs

from gateway.errors import InvalidRequest, UnsupportedParameter
from gateway.pipeline.fields import GenerationFields, NumLogprobs, ReasoningEffort, Verbosity, template_kwargs
from gateway.pipeline.grammar import ToolCallFields, ToolChoice, Tools, rendered_calls, tool_use
from gateway.pipeline.request import CompletionRequest, common_request
from gateway.text.chat_template import ChatMessage, TemplateOptions

ROLES = ("system", "developer", "user", "assistant", "tool")
FieldWords: TypeAlias = Sequence[tuple[str, str]]  # (name in a chat, name in another API), applied in this order

_Count: TypeAlias = Annotated[int, Meta(ge=1, lt=2**31)]


TEXT_ONLY = "this server reads text only"


class ContentPart(msgspec.Struct):
    type: str
    text: str | None = None


class MessageFields(msgspec.Struct):
    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCallFields] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None  # of an assistant's earlier answer; `reasoning_content` is its older name
    reasoning_content: str | None = None


Messages: TypeAlias = Annotated[list[MessageFields], Meta(min_length=1, max_length=4096)]


class ChatBody(GenerationFields, kw_only=True):
    messages: Messages
    max_completion_tokens: _Count | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: ReasoningEffort | None = None
    verbosity: Verbosity | None = None


def chat_request(fields: ChatBody, ignored: tuple[str, ...]) -> CompletionRequest:
    """Convert a chat body; raise InvalidRequest."""
    messages, template = chat_prompt(fields.messages, fields.add_generation_prompt, fields.continue_final_message)
    request = common_request(
        fields,
        (messages,),
        ignored,
        prompt_param="messages",
        max_tokens_param="max_tokens" if fields.max_completion_tokens is None else "max_completion_tokens",
        add_special_tokens=bool(fields.add_special_tokens),  # default False: chat templates add them
    )
    tools, grammar = tool_use(fields), request.grammar
    template["template_kwargs"] = template_kwargs(
        fields.reasoning_effort, fields.verbosity, fields.chat_template_kwargs
    )
    if tools is not None:
        template["tools"], grammar = tools.definitions, tools.grammar or grammar
    return structs.replace(
        request, tools=tools, grammar=grammar, template=template, is_chat=True, num_logprobs=_chat_num_logprobs(fields)
    )


def request_in_words(fields: ChatBody, ignored: tuple[str, ...], words: FieldWords) -> CompletionRequest:
    """Convert a chat body that another API's body was mapped to.

    Errors name the fields of that API (`words`), and its streams always include usage.

    Raises:
        InvalidRequest: If the body is invalid.
    """
    try:
        request = chat_request(fields, ignored)
    except InvalidRequest as error:
        param = error.param and _in_words(error.param, words)
        raise type(error)(_in_words(error.message, words), param=param, code=error.code) from error
    grammar, answer_grammar = (
        asked and replace(asked, param=_in_words(asked.param, words))
        for asked in (request.grammar, request.answer_grammar)
    )
    return structs.replace(request, grammar=grammar, answer_grammar=answer_grammar, include_usage=bool(fields.stream))


def _in_words(text: str, words: FieldWords) -> str:
    for chat_name, api_name in words:
        text = text.replace(chat_name, api_name)
    return text


def chat_prompt(
    message_fields: list[MessageFields], add_generation_prompt: bool | None, continue_final_message: bool | None
) -> tuple[tuple[ChatMessage, ...], TemplateOptions]:
    """Return the messages and the template options; raise InvalidRequest."""
    continue_final = bool(continue_final_message)
    add_prompt = not continue_final if add_generation_prompt is None else add_generation_prompt
    if continue_final and add_prompt:
        raise InvalidRequest(
            "continue_final_message: cannot be true together with add_generation_prompt.",
            param="continue_final_message",
        )
    if continue_final and message_fields[-1].tool_calls:
        param = f"messages[{len(message_fields) - 1}].tool_calls"
        raise InvalidRequest(f"{param}: a message with calls cannot be continued.", param=param)
    messages = tuple(_message(message, f"messages[{index}]") for index, message in enumerate(message_fields))
    return messages, TemplateOptions(add_generation_prompt=add_prompt, continue_final_message=continue_final)


def _chat_num_logprobs(fields: ChatBody) -> int | None:
    if fields.logprobs:
        return fields.top_logprobs or 0
    if fields.top_logprobs:
        raise InvalidRequest("top_logprobs: only allowed when logprobs is true.", param="top_logprobs")
    return None


def _message(message: MessageFields, path: str) -> ChatMessage:
    if message.role not in ROLES:
        raise InvalidRequest(
            f"{path}.role: {message.role[:100]!r} is not one of {', '.join(ROLES)}.", param=f"{path}.role"
        )
    # `developer` is OpenAI's newer name of `system`; the templates of open models lack it.
    role = "system" if message.role == "developer" else message.role
    rendered = ChatMessage(role=role, content=_content(message, f"{path}.content"))
    if message.name is not None:
        rendered["name"] = message.name
    if message.tool_calls:
        rendered["tool_calls"] = rendered_calls(message.tool_calls, f"{path}.tool_calls")
    if message.tool_call_id is not None:
        rendered["tool_call_id"] = message.tool_call_id
    if role == "assistant" and (reasoning := message.reasoning or message.reasoning_content):
        # Templates use either name, and decide which turns keep their reasoning.
        rendered["reasoning"] = rendered["reasoning_content"] = reasoning
    return rendered


def _content(message: MessageFields, path: str) -> str:
    if message.content is None:
        if message.role != "assistant":
            raise InvalidRequest(f"{path}: a {message.role} message needs a text or a list of text parts.", param=path)
        return ""
    if isinstance(message.content, str):
        return message.content
    texts = []
    for index, part in enumerate(message.content):
        if part.type != "text":
            raise UnsupportedParameter(
                f"{path}[{index}].type: expected 'text'; {TEXT_ONLY}.", param=f"{path}[{index}].type"
            )
        if part.text is None:
            raise InvalidRequest(f"{path}[{index}].text: expected a text.", param=f"{path}[{index}].text")
        texts.append(part.text)
    return "\n".join(texts)
