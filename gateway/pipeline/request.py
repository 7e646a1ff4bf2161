"""CompletionRequest, the form of a request of any API that the rest of the gateway uses. Pure.

Fields of a body that no schema has are of three kinds: known without effect here (`user`), accepted silently; known,
not supported, and able to change the answer, refused unless neutral; unknown, accepted and listed in `ignored`, so that
the sender can see a misspelled option. plan.py checks limits that need a model.
"""

import json
from collections.abc import Collection, Mapping
from typing import Any, TypeAlias

import msgspec

from gateway.errors import InvalidRequest, UnsupportedParameter
from gateway.http.json_body import is_neutral
from gateway.pipeline.fields import (
    ChoiceCount,
    GenerationFields,
    StreamOptions,
    Words,
    choice_count,
)
from gateway.pipeline.grammar import AskedGrammar, ToolUse, asked_grammar
from gateway.text.chat_template import ChatMessage, TemplateOptions
from shared.messages import Pooling
from shared.model_files import Task
from shared.redis_keys import PRIORITY_CLASSES

MAX_CHOICES = 64  # per request: best_of, or n, times the number of prompts


NO_EFFECT = frozenset(("user", "metadata", "safety_identifier", "parallel_tool_calls", "service_tier"))
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


class FilledPrompt(msgspec.Struct, frozen=True):
    """A format string of this server, and the client's texts for its fields."""

    template: str
    texts: Mapping[str, str]


Prompt: TypeAlias = tuple[ChatMessage, ...] | str | list[int] | FilledPrompt  # a chat, a text, or token ids


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
    task: Task = Task.GENERATE
    pooling: Pooling | None = None  # of task embed

    @property
    def grammars(self) -> tuple[AskedGrammar, ...]:
        """All grammars to check, including that of an answer that a forced call rules out."""
        return tuple(dict.fromkeys(filter(None, (self.answer_grammar, self.grammar))))

    @property
    def may_answer_or_call(self) -> bool:
        """Whether the answer is either in a requested format or consists of calls."""
        return self.answer_grammar is not None and self.tools is not None and self.tools.mode == "auto"

    @property
    def default_class(self) -> str:
        """The priority class of a request that names none: prompts without an answer yield to chats."""
        return PRIORITY_CLASSES[0 if self.task is Task.GENERATE else 1]

    @property
    def n(self) -> int:
        """Number of returned choices per prompt."""
        return self.choices.n

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Number of most likely tokens returned per prompt position, or None."""
        if not self.echo or self.num_logprobs is None:
            return self.fields.prompt_logprobs
        return max(self.num_logprobs, self.fields.prompt_logprobs or 0)


def prompt_list(prompt: str | list[str | int | list[int]], param: str, max_prompts: int) -> tuple[Prompt, ...]:
    """Return the prompts of a field that has one or several, as texts or token ids. Raises InvalidRequest."""
    if isinstance(prompt, str):
        return (prompt,)
    kinds = {type(item) for item in prompt}
    if kinds == {int}:
        return (prompt,)  # type: ignore[return-value]
    if kinds not in ({str}, {list}):
        what = "is an empty list" if not prompt else "mixes texts, token ids and lists of token ids"
        raise InvalidRequest(
            f"{param}: {what}; expected a text, a list of texts, token ids, or a list of lists of token ids.",
            param=param,
        )
    if len(prompt) > max_prompts:
        raise InvalidRequest(f"{param}: {len(prompt)} prompts; at most {max_prompts} in one request.", param=param)
    return tuple(prompt)  # type: ignore[arg-type]


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


def common_request(
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
    """Return the parts of a request that chats and completions share; raise InvalidRequest."""
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
