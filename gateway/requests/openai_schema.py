"""OpenAI's request bodies -> CompletionRequest, the one form that the rest of the gateway works on. Pure.

The types are the validation: msgspec checks them while it decodes and names the path of what is wrong. Three kinds of
further fields: known ones without effect here (`user`), silently taken; known ones that would change the answer and are
not supported, refused unless at their neutral value; unknown ones, taken and listed in `ignored`, so that a misspelt or
foreign option is visible to its sender. Knows no tokens: limits that need a model are checked in planning.py.

A chat's way in, where its body is checked.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, TypeAlias

import msgspec
from msgspec import Meta, structs

from gateway.errors import InvalidRequest, UnsupportedParameter
from gateway.requests.generation_fields import (
    ChoiceCount,
    GenerationFields,
    StreamOptions,
    TokenId,
    Words,
    check_extra_fields,
    check_token_fields,
    choice_count,
)
from gateway.requests.grammar_fields import (
    AskedGrammar,
    ToolCallFields,
    ToolChoice,
    Tools,
    ToolUse,
    asked_grammar,
    rendered_calls,
    tool_use,
)
from gateway.requests.request_body import JsonBody, is_neutral
from gateway.text.chat_template import ChatMessage, TemplateOptions
from shared.messages import MAX_LOGPROBS

MAX_PROMPTS = 32
MAX_CHOICES = 64  # computed at one time: best_of, or n, times the number of prompts
ROLES = ("system", "developer", "user", "assistant", "tool")

_Count: TypeAlias = Annotated[int, Meta(ge=1, lt=2**31)]
_NumLogprobs: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]


class ContentPart(msgspec.Struct):
    type: str
    text: str | None = None


class MessageFields(msgspec.Struct):
    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCallFields] | None = None
    tool_call_id: str | None = None


Messages: TypeAlias = Annotated[list[MessageFields], Meta(min_length=1, max_length=4096)]


class ChatBody(GenerationFields, kw_only=True):
    messages: Messages
    max_completion_tokens: _Count | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    logprobs: bool | None = None
    top_logprobs: _NumLogprobs | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None


class CompletionBody(GenerationFields, kw_only=True):
    prompt: str | list[str | TokenId | list[TokenId]]
    echo: bool | None = None
    logprobs: _NumLogprobs | None = None
    max_tokens: Annotated[int, Meta(ge=0, lt=2**31)] | None = None  # 0: the prompt alone, for those who score it


NO_EFFECT = frozenset(
    ("user", "metadata", "safety_identifier", "prompt_cache_key", "parallel_tool_calls", "service_tier")
)
# field -> the values at which it changes nothing, null aside
UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "logprobs": (False,),
    "top_logprobs": (0,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "suffix": ("",),
    "echo": (False,),  # of chat; completions have it
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "documents": ([],),
    "chat_template": (),
    "logits_processors": ([],),
    "prompt_embeds": (),
    "structural_tag": (),
    "stop_regex": ([],),
    "guided_whitespace_pattern": (),
}


FieldWords: TypeAlias = Sequence[tuple[str, str]]  # what is said of a chat's fields -> of another API's, in this order
Prompt: TypeAlias = tuple[ChatMessage, ...] | str | list[int]  # a chat, a text, or token ids


class CompletionRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request in its own words, whatever its API. A struct, which is made anew in a tenth of a dataclass's time."""

    model: str | None
    prompts: tuple[Prompt, ...]  # one, if it is a chat
    prompt_param: str  # the field to name when a prompt is wrong
    fields: GenerationFields
    choices: ChoiceCount
    max_tokens: int | None
    max_tokens_param: str
    default_max_tokens: int | None  # None: all the room that the context has
    stops: tuple[str, ...]
    add_special_tokens: bool
    stream: bool
    include_usage: bool
    continuous_usage: bool
    echo: bool
    ignored: tuple[str, ...]
    grammar: AskedGrammar | None = None  # of the answer's text, calls included
    answer_grammar: AskedGrammar | None = None  # of a text that calls nothing, as the client asked
    tools: ToolUse | None = None
    is_chat: bool = False
    template: TemplateOptions = msgspec.field(default_factory=TemplateOptions)  # of a chat
    reasons_only_if_told_apart: bool = False  # else the template is told to leave out reasoning, which nobody reads
    must_think: bool = False  # refused where nothing tells reasoning apart
    background: bool = False  # goes on without a reader; unless streamed, what is answered is its state
    repeated: Mapping[str, Any] = msgspec.field(default_factory=dict)  # what its answer says again of it
    num_logprobs: int | None = None  # None: none at all; 0: of the chosen tokens only
    bad_words: Words = ()  # as tokens; set when the model is known

    @property
    def grammars(self) -> tuple[AskedGrammar, ...]:
        """Each is to be one that can be followed, also that of an answer which a forced call leaves no room."""
        return tuple(dict.fromkeys(asked for asked in (self.answer_grammar, self.grammar) if asked is not None))

    @property
    def may_answer_or_call(self) -> bool:
        """Whether its answer has a form that was asked for, or calls instead."""
        return self.answer_grammar is not None and self.tools is not None and self.tools.mode == "auto"

    @property
    def n(self) -> int:
        """Choices of each prompt in the answer."""
        return self.choices.n

    @property
    def num_prompt_logprobs(self) -> int | None:
        """How many of the likeliest tokens are told at each place of the prompt, for whatever reason."""
        asked = (self.fields.prompt_logprobs, self.num_logprobs if self.echo else None)
        return max((count for count in asked if count is not None), default=None)


def parse_chat(body: JsonBody) -> CompletionRequest:
    fields = body.typed(ChatBody)
    return chat_request(fields, check_other_fields(ChatBody, body.given))


def chat_request(fields: ChatBody, ignored: tuple[str, ...]) -> CompletionRequest:
    """Raises InvalidRequest."""
    messages, template = chat_prompt(fields.messages, fields.add_generation_prompt, fields.continue_final_message)
    request = _request(
        fields,
        (messages,),
        ignored,
        prompt_param="messages",
        max_tokens_param="max_tokens" if fields.max_completion_tokens is None else "max_completion_tokens",
        add_special_tokens=bool(fields.add_special_tokens),  # chat templates write them themselves
    )
    tools, grammar = tool_use(fields), request.grammar
    template["template_kwargs"] = fields.chat_template_kwargs or {}
    if tools is not None:
        template["tools"], grammar = tools.definitions, tools.grammar or grammar
    return structs.replace(
        request, tools=tools, grammar=grammar, template=template, is_chat=True, num_logprobs=_chat_num_logprobs(fields)
    )


def request_in_words(fields: ChatBody, ignored: tuple[str, ...], words: FieldWords) -> CompletionRequest:
    """A chat's request of what another API asks in a chat's fields. What is wrong is told of that API's own, and its
    streams always have their usage. Raises InvalidRequest."""
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


def _in_words(said: str, words: FieldWords) -> str:
    for chats, others in words:
        said = said.replace(chats, others)
    return said


def parse_completion(body: JsonBody) -> CompletionRequest:
    fields = body.typed(CompletionBody)
    ignored = check_other_fields(CompletionBody, body.given)
    request = _request(
        fields,
        _prompts(fields.prompt),
        ignored,
        prompt_param="prompt",
        max_tokens_param="max_tokens",
        default_max_tokens=16,  # OpenAI's
        add_special_tokens=fields.add_special_tokens is not False,
        echo=bool(fields.echo),
    )
    if fields.max_tokens == 0 and not fields.echo:
        raise InvalidRequest("max_tokens: 0 is only allowed with echo; expected at least 1.", param="max_tokens")
    return structs.replace(request, num_logprobs=fields.logprobs)


def check_other_fields(
    kind: type[msgspec.Struct],
    given: Mapping[str, Any],
    unsupported: Mapping[str, tuple[Any, ...]] = UNSUPPORTED,
    no_effect: Collection[str] = NO_EFFECT,
) -> tuple[str, ...]:
    """Refuse known fields that are not supported; the names of unknown ones come back."""
    ignored = []
    for name in given:
        if name in kind.__struct_fields__ or name in no_effect:
            continue
        if name not in unsupported:
            ignored.append(name)
        elif (value := given[name]) is not None and not is_neutral(value, unsupported[name]):
            neutral = " or ".join(json.dumps(allowed) for allowed in (None, *unsupported[name]))
            raise UnsupportedParameter(f"{name}: not supported by this server; leave it out, or {neutral}.", param=name)
    return tuple(ignored)


def chat_prompt(
    message_fields: list[MessageFields], add_generation_prompt: bool | None, continue_final_message: bool | None
) -> tuple[tuple[ChatMessage, ...], TemplateOptions]:
    """The messages, and how they are rendered. Raises InvalidRequest."""
    continue_final = bool(continue_final_message)
    add_prompt = not continue_final if add_generation_prompt is None else add_generation_prompt
    if continue_final and add_prompt:
        raise InvalidRequest(
            "continue_final_message: cannot be true together with add_generation_prompt.",
            param="continue_final_message",
        )
    if continue_final and message_fields[-1].tool_calls:
        param = f"messages[{len(message_fields) - 1}].tool_calls"
        raise InvalidRequest(f"{param}: a message that ends with calls cannot be continued.", param=param)
    messages = tuple(_message(message, f"messages[{index}]") for index, message in enumerate(message_fields))
    return messages, TemplateOptions(add_generation_prompt=add_prompt, continue_final_message=continue_final)


def _request(
    fields: GenerationFields,
    prompts: tuple[Prompt, ...],
    ignored: tuple[str, ...],
    *,
    prompt_param: str,
    max_tokens_param: str,
    add_special_tokens: bool,
    default_max_tokens: int | None = None,
    echo: bool = False,
) -> CompletionRequest:
    choices = choice_count(fields)
    num_choices = choices.num_candidates * len(prompts)
    if num_choices > MAX_CHOICES:
        param = "n" if fields.best_of is None else "best_of"
        raise InvalidRequest(
            f"{param}: {choices.num_candidates} choices of {len(prompts)} prompts are {num_choices}; "
            f"at most {MAX_CHOICES}.",
            param=param,
        )
    stream = bool(fields.stream)
    if fields.stream_options is not None and not stream:
        raise InvalidRequest("stream_options: only allowed when stream is true.", param="stream_options")
    check_extra_fields(fields, stream=stream, use_beam_search=choices.use_beam_search)
    check_token_fields(fields)
    options, grammar = fields.stream_options or StreamOptions(), asked_grammar(fields)
    return CompletionRequest(
        model=fields.model,
        prompts=prompts,
        prompt_param=prompt_param,
        fields=fields,
        choices=choices,
        max_tokens=getattr(fields, max_tokens_param),
        max_tokens_param=max_tokens_param,
        default_max_tokens=default_max_tokens,
        stops=(fields.stop,) if isinstance(fields.stop, str) else tuple(fields.stop or ()),
        add_special_tokens=add_special_tokens,
        stream=stream,
        include_usage=bool(options.include_usage),
        continuous_usage=bool(options.include_usage and options.continuous_usage_stats),
        echo=echo,
        ignored=ignored,
        grammar=grammar,
        answer_grammar=grammar,
    )


def _chat_num_logprobs(fields: ChatBody) -> int | None:
    if fields.logprobs:
        return fields.top_logprobs or 0
    if fields.top_logprobs:
        raise InvalidRequest("top_logprobs: only allowed when logprobs is true.", param="top_logprobs")
    return None


def _prompts(prompt: str | list[str | int | list[int]]) -> tuple[Prompt, ...]:
    if isinstance(prompt, str):
        return (prompt,)
    kinds = {type(item) for item in prompt}
    if kinds == {int}:
        return (prompt,)  # type: ignore[return-value]
    if kinds not in ({str}, {list}):
        what = "is empty" if not prompt else "mixes texts, token ids and lists of token ids"
        raise InvalidRequest(
            f"prompt: {what}; expected a text, a list of texts, token ids, or a list of lists of token ids.",
            param="prompt",
        )
    if len(prompt) > MAX_PROMPTS:
        raise InvalidRequest(f"prompt: {len(prompt)} prompts; at most {MAX_PROMPTS} in one request.", param="prompt")
    return tuple(prompt)  # type: ignore[arg-type]


def _message(message: MessageFields, path: str) -> ChatMessage:
    if message.role not in ROLES:
        raise InvalidRequest(
            f"{path}.role: {message.role[:100]!r} is not one of {', '.join(ROLES)}.", param=f"{path}.role"
        )
    # `developer` is OpenAI's newer word for it, which open models' templates do not know.
    role = "system" if message.role == "developer" else message.role
    rendered = ChatMessage(role=role, content=_content(message, f"{path}.content"))
    if message.name is not None:
        rendered["name"] = message.name
    if message.tool_calls:
        rendered["tool_calls"] = rendered_calls(message.tool_calls, f"{path}.tool_calls")
    if message.tool_call_id is not None:
        rendered["tool_call_id"] = message.tool_call_id
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
                f"{path}[{index}].type: this server reads parts of type 'text' only.", param=f"{path}[{index}].type"
            )
        if part.text is None:
            raise InvalidRequest(f"{path}[{index}].text: expected a text.", param=f"{path}[{index}].text")
        texts.append(part.text)
    return "\n".join(texts)
