"""OpenAI request bodies, converted to CompletionRequest, the form that the rest of the gateway uses. Pure.

msgspec validates the types and names the path of an error. Other fields are of three kinds: known without effect here
(`user`), accepted silently; known, not supported, and able to change the answer, refused unless neutral; unknown,
accepted and listed in `ignored`, so that the sender can see a misspelled option. plan.py checks limits that need a
model.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, TypeAlias

import msgspec
from msgspec import Meta, structs

from gateway.errors import InvalidRequest, UnsupportedParameter
from gateway.http.json_body import JsonBody, is_neutral
from gateway.pipeline.fields import (
    ChoiceCount,
    GenerationFields,
    ReasoningEffort,
    StreamOptions,
    TokenId,
    Verbosity,
    Words,
    check_extra_fields,
    check_token_fields,
    choice_count,
    template_kwargs,
)
from gateway.pipeline.grammar import (
    AskedGrammar,
    ToolCallFields,
    ToolChoice,
    Tools,
    ToolUse,
    asked_grammar,
    rendered_calls,
    tool_use,
)
from gateway.text.chat_template import ChatMessage, TemplateOptions
from shared.messages import MAX_LOGPROBS

MAX_PROMPTS = 32
MAX_CHOICES = 64  # per request: best_of, or n, times the number of prompts
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
    reasoning: str | None = None  # of an assistant's earlier answer; `reasoning_content` is its older name
    reasoning_content: str | None = None


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
    reasoning_effort: ReasoningEffort | None = None
    verbosity: Verbosity | None = None


class CompletionBody(GenerationFields, kw_only=True):
    prompt: str | list[str | TokenId | list[TokenId]]
    echo: bool | None = None
    logprobs: _NumLogprobs | None = None
    max_tokens: Annotated[int, Meta(ge=0, lt=2**31)] | None = None  # 0 scores the prompt only (with echo)


NO_EFFECT = frozenset(
    ("user", "metadata", "safety_identifier", "prompt_cache_key", "parallel_tool_calls", "service_tier")
)
# field -> values besides null that have no effect
UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "logprobs": (False,),
    "top_logprobs": (0,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "suffix": ("",),
    "echo": (False,),  # chats only
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "documents": ([],),
    "chat_template": (),
    "logits_processors": ([],),
    "prompt_embeds": (),
    "structural_tag": (),
    "stop_regex": ([],),
    "lora_request": (),
    "guided_whitespace_pattern": (),
}


FieldWords: TypeAlias = Sequence[tuple[str, str]]  # (name in a chat, name in another API), applied in this order
Prompt: TypeAlias = tuple[ChatMessage, ...] | str | list[int]  # a chat, a text, or token ids


class CompletionRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A validated request of any API. A struct, because copying one takes a tenth of a dataclass's time."""

    model: str | None
    prompts: tuple[Prompt, ...]  # exactly one for a chat
    prompt_param: str  # field to name in errors about a prompt
    fields: GenerationFields
    choices: ChoiceCount
    max_tokens: int | None
    max_tokens_param: str
    default_max_tokens: int | None  # None: the rest of the context
    stops: tuple[str, ...]
    add_special_tokens: bool
    stream: bool
    include_usage: bool
    continuous_usage: bool
    echo: bool
    ignored: tuple[str, ...]
    grammar: AskedGrammar | None = None  # of the whole answer, calls included
    answer_grammar: AskedGrammar | None = None  # of an answer without calls, as requested
    tools: ToolUse | None = None
    is_chat: bool = False
    template: TemplateOptions = msgspec.field(default_factory=TemplateOptions)  # chats only
    reasons_only_if_parsed: bool = False  # without a reasoning parser the template disables thinking
    must_think: bool = False  # refused without a reasoning parser
    background: bool = False  # continues without a reader; unless streamed, the reply is its state
    repeated: Mapping[str, Any] = msgspec.field(default_factory=dict)  # fields that the response repeats
    num_logprobs: int | None = None  # None: no logprobs; 0: only of the chosen tokens
    bad_words: Words = ()  # token sequences; set once the model is known

    @property
    def grammars(self) -> tuple[AskedGrammar, ...]:
        """All grammars to check, including that of an answer that a forced call rules out."""
        return tuple(dict.fromkeys(asked for asked in (self.answer_grammar, self.grammar) if asked is not None))

    @property
    def may_answer_or_call(self) -> bool:
        """Whether the answer is either in a requested format or consists of calls."""
        return self.answer_grammar is not None and self.tools is not None and self.tools.mode == "auto"

    @property
    def n(self) -> int:
        """Number of returned choices per prompt."""
        return self.choices.n

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Number of most likely tokens returned per prompt position, or None."""
        asked = (self.fields.prompt_logprobs, self.num_logprobs if self.echo else None)
        return max((count for count in asked if count is not None), default=None)


def parse_chat(body: JsonBody) -> CompletionRequest:
    fields = body.typed(ChatBody)
    return chat_request(fields, check_other_fields(ChatBody, body.given))


def chat_request(fields: ChatBody, ignored: tuple[str, ...]) -> CompletionRequest:
    """Convert a chat body; raise InvalidRequest."""
    messages, template = chat_prompt(fields.messages, fields.add_generation_prompt, fields.continue_final_message)
    request = _request(
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


def parse_completion(body: JsonBody) -> CompletionRequest:
    fields = body.typed(CompletionBody)
    ignored = check_other_fields(CompletionBody, body.given)
    request = _request(
        fields,
        _prompts(fields.prompt),
        ignored,
        prompt_param="prompt",
        max_tokens_param="max_tokens",
        default_max_tokens=16,  # OpenAI's default
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
    """Refuse known fields that are not supported; return the names of unknown ones."""
    ignored = []
    for name in given:
        if name in kind.__struct_fields__ or name in no_effect:
            continue
        if name not in unsupported:
            ignored.append(name)
        elif (value := given[name]) is not None and not is_neutral(value, unsupported[name]):
            neutral = " or ".join(json.dumps(allowed) for allowed in (None, *unsupported[name]))
            raise UnsupportedParameter(f"{name}: not supported; remove it or use {neutral}.", param=name)
    return tuple(ignored)


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
            f"{param}: {choices.num_candidates} choices of {len(prompts)} prompts are {num_choices} choices; "
            f"at most {MAX_CHOICES} per request.",
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
        what = "is an empty list" if not prompt else "mixes texts, token ids and lists of token ids"
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
                f"{path}[{index}].type: expected 'text'; other parts are not supported.", param=f"{path}[{index}].type"
            )
        if part.text is None:
            raise InvalidRequest(f"{path}[{index}].text: expected a text.", param=f"{path}[{index}].text")
        texts.append(part.text)
    return "\n".join(texts)
