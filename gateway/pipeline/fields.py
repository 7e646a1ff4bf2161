"""Fields of chats and completions that control generation (OpenAI's and vLLM's), and their checks. Pure.

    n                                 number of samples
    n, best_of                        best_of samples, of which the n most likely are returned
    use_beam_search, best_of or n     beam search of that width; its n best sequences are returned
    allowed_token_ids    only these tokens are sampled; the end-of-sequence token must be listed to be sampled
    bad_words            texts that the output never contains, at its start or after a space
    logprob_token_ids    with logprobs: return those of the chosen token, then of these, not of the most likely
    timeout_seconds          limit for the whole answer            504 deadline_exceeded
    queue_timeout_seconds    limit until a worker starts           503 queue_timeout

A request without a queue timeout that arrives while no worker is ready waits at most --no-worker-wait-seconds. After a
timeout the error is an event if the stream has started, otherwise a status. Deadlines use the fleet clock
(shared/fleet_clock.py), so a worker can refuse an expired request before it computes anything.

The types validate; null means absent. Beam search does not sample and ranks by the model's own probabilities, so fields
that change either are refused with it. A bad word is matched as the token sequences of the word with and without a
leading space; other spellings in tokens are not found.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta

from gateway.errors import InvalidRequest
from gateway.fleet import Timeouts
from gateway.http.json_body import is_neutral
from gateway.pipeline.grammar import Choices, ResponseFormatFields, Schema, StructuredOutputs
from shared.messages import MAX_LOGPROBS
from shared.redis_keys import PRIORITY_CLASSES

MAX_SAMPLES = 8  # per prompt
MAX_BEAM_WIDTH = 64
# Both forms of all bad words together; a worker indexes them before its next step. vLLM's limit is 1,024.
MAX_BAD_WORD_TOKENS = 8192

NumLogprobs: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]
TokenId: TypeAlias = Annotated[int, Meta(ge=0, lt=2**31)]
_Word: TypeAlias = Annotated[str, Meta(min_length=1, max_length=256)]
Words: TypeAlias = tuple[tuple[int, ...], ...]


StopString: TypeAlias = Annotated[str, Meta(min_length=1, max_length=256)]
_ChoiceCount: TypeAlias = Annotated[int, Meta(ge=1, le=MAX_BEAM_WIDTH)]
PRIORITY_HEADER = "x-priority"  # a class name, for clients that cannot add a field


ReasoningEffort: TypeAlias = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Verbosity: TypeAlias = Literal["low", "medium", "high"]


def template_kwargs(
    effort: ReasoningEffort | None, verbosity: Verbosity | None, given: dict[str, Any] | None
) -> dict[str, Any]:
    """Return the template variables for effort and verbosity, and the client's own; templates ignore unknown ones."""
    kwargs: dict[str, Any] = {} if effort is None else {"reasoning_effort": effort}
    if effort == "none":
        kwargs["enable_thinking"] = False
    if verbosity is not None:
        kwargs["verbosity"] = verbosity
    return kwargs | (given or {})


class SamplingFields(msgspec.Struct, kw_only=True):
    """Sampling fields of chats, completions, and responses; null means absent."""

    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Meta(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2.0, le=2.0)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2.0, le=2.0)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0.0, le=10.0)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=4)] | None = None
    ignore_eos: bool | None = None
    cache_salt: Annotated[str, Meta(max_length=128)] | None = None
    prompt_cache_key: str | None = None  # requests with the same key prefer the same worker
    detach_seconds: Annotated[float, Meta(ge=0.0)] | None = None
    timeout_seconds: Annotated[float, Meta(gt=0.0)] | None = None
    queue_timeout_seconds: Annotated[float, Meta(gt=0.0)] | None = None
    priority: Annotated[int, Meta(ge=-(2**31), lt=2**31)] | None = None  # lower values run first
    chat_template_kwargs: dict[str, Any] | None = None


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationFields(SamplingFields, kw_only=True):
    """Further fields that chats and completions share: OpenAI's, and vLLM's top-level extensions."""

    model: str | None = None
    n: _ChoiceCount | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logit_bias: Annotated[dict[str, Annotated[float, Meta(ge=-100.0, le=100.0)]], Meta(max_length=300)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=128)] | None = None
    max_tokens: Annotated[int, Meta(ge=1, lt=2**31)] | None = None
    min_tokens: Annotated[int, Meta(ge=0, lt=2**31)] | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    add_special_tokens: bool | None = None
    best_of: _ChoiceCount | None = None
    use_beam_search: bool | None = None
    length_penalty: Annotated[float, Meta(ge=-10.0, le=10.0)] | None = None
    early_stopping: bool | Literal["never"] | None = None
    response_format: ResponseFormatFields | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    json_schema: Schema | None = None
    grammar: str | None = None
    allowed_token_ids: Annotated[list[TokenId], Meta(min_length=1)] | None = None
    bad_words: Annotated[list[_Word], Meta(max_length=500)] | None = None  # two forms each; vLLM's limit is 1,000 forms
    logprob_token_ids: Annotated[list[TokenId], Meta(max_length=128)] | None = None  # vLLM's limit
    prompt_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, lt=2**31)] | None = None  # -1: as many as fit
    truncation_side: Literal["left", "right"] | None = None  # the side that is cut; default "left"
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None  # with logprobs: token_id:123 instead of the token's text


def words_token_ids(words: Iterable[str], encode: Callable[[str], list[int]]) -> Words:
    """Return the token sequences of `words`, each with and without a leading space.

    Args:
        words: The field bad_words.
        encode: Tokenizer call without special tokens.

    Raises:
        InvalidRequest: If a word has no tokens, or at the first word that exceeds the total limit.
    """
    found: dict[tuple[int, ...], None] = {}
    num_tokens = 0
    for index, word in enumerate(words):
        bare = word.lstrip()
        forms = [tuple(encode(form)) for form in (bare, f" {bare}")] if bare else [tuple(encode(word))]
        if not forms[0]:
            param = f"bad_words[{index}]"
            raise InvalidRequest(f"{param}: {word!r} has no tokens.", param=param)
        num_tokens += sum(map(len, forms))
        if num_tokens > MAX_BAD_WORD_TOKENS:
            raise InvalidRequest(
                f"bad_words: the first {index + 1} words are {num_tokens} tokens with and without a space before each; "
                f"at most {MAX_BAD_WORD_TOKENS} tokens in all.",
                param="bad_words",
            )
        found |= dict.fromkeys(form for form in forms if form)
    return tuple(found)


def check_something_is_allowed(allowed: tuple[int, ...] | None, words: Words) -> None:
    """Raise InvalidRequest if every allowed token is a bad word."""
    if allowed is not None and {(token_id,) for token_id in allowed} <= set(words):
        raise InvalidRequest("bad_words: forbid every one of allowed_token_ids.", param="bad_words")


# Names that the gateway sets when it renders a template; a client's value would replace them.
RESERVED_TEMPLATE_NAMES = frozenset(
    ("messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token", "unk_token", "pad_token")
)


def asked_class(priority: int | None, header: str | None, default: str = PRIORITY_CLASSES[0]) -> str:
    """Return the priority class of a request; the header takes precedence, and `default` counts if neither is given.

    There are two classes, so a priority below 0 equals the default 0.

    Raises:
        InvalidRequest: If the header names no class.
    """
    if header is not None:
        if header not in PRIORITY_CLASSES:
            allowed = " or ".join(PRIORITY_CLASSES)
            raise InvalidRequest(f"{PRIORITY_HEADER}: expected {allowed}; got {header[:40]!r}.", param=PRIORITY_HEADER)
        return header
    if priority is None:
        return default
    return PRIORITY_CLASSES[1] if priority > 0 else PRIORITY_CLASSES[0]


def truncated(token_ids: list[int], truncate: int, side: str | None, room_tokens: int) -> list[int]:
    """Return the prompt cut to `truncate` tokens; -1 cuts it to `room_tokens`, which leaves room for the answer."""
    num_kept = truncate if truncate > 0 else max(1, room_tokens)
    return token_ids[:num_kept] if side == "right" else token_ids[-num_kept:]


def timeouts_of(fields: GenerationFields, defaults: Timeouts, max_seconds: float) -> Timeouts:
    """Return the timeouts of a request.

    Raises:
        InvalidRequest: If a field exceeds `max_seconds`.
    """
    for param, seconds in (
        ("timeout_seconds", fields.timeout_seconds),
        ("queue_timeout_seconds", fields.queue_timeout_seconds),
    ):
        if seconds is not None and seconds > max_seconds:
            raise InvalidRequest(f"{param}: expected at most {max_seconds:g}; got {seconds:g}.", param=param)
    return Timeouts(
        defaults.total_seconds if fields.timeout_seconds is None else fields.timeout_seconds,
        defaults.queue_seconds if fields.queue_timeout_seconds is None else fields.queue_timeout_seconds,
        defaults.no_worker_seconds,
    )


# field -> values besides null that have no effect
_NEUTRAL_IN_BEAM_SEARCH: dict[str, tuple[Any, ...]] = {
    "temperature": (0,),
    "top_p": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "min_tokens": (0,),
    "stop": ([],),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "logprob_token_ids": ([],),
}
_ONLY_IN_BEAM_SEARCH: dict[str, tuple[Any, ...]] = {"length_penalty": (1.0,), "early_stopping": (False,)}


@dataclass(frozen=True, slots=True)
class ChoiceCount:
    n: int  # returned
    num_candidates: int  # computed: best_of, or the beam width
    use_beam_search: bool

    @property
    def num_sent(self) -> int:
        """Number of sequences that the engine sends; it drops the unused ones of a beam search."""
        return self.n if self.use_beam_search else self.num_candidates

    @property
    def is_best_of(self) -> bool:
        """Whether the samples are ranked and only some are returned."""
        return not self.use_beam_search and self.num_candidates > self.n


def choice_count(fields: Any) -> ChoiceCount:
    """`fields`: GenerationFields, whose types are checked. Raises InvalidRequest if they do not fit together."""
    n = fields.n or 1
    choices = ChoiceCount(n, n if fields.best_of is None else fields.best_of, bool(fields.use_beam_search))
    for param, problem in chain(_problems_of_choices(fields, choices), _problems_of_extensions(fields)):
        raise InvalidRequest(f"{param}: {problem}.", param=param)
    return choices


def _problems_of_extensions(fields: Any) -> Iterator[tuple[str, str]]:
    if fields.prompt_logprobs is not None and fields.stream:
        yield "prompt_logprobs", "not available when stream is true"
    if fields.prompt_logprobs is not None and fields.use_beam_search:
        yield "prompt_logprobs", "has no meaning with use_beam_search"
    if fields.truncate_prompt_tokens == 0:
        yield "truncate_prompt_tokens", "expected -1, or 1 or more; got 0"
    for name in fields.chat_template_kwargs or ():
        if name in RESERVED_TEMPLATE_NAMES:
            yield f"chat_template_kwargs.{name}", "set by the server; remove it"
    if fields.logprob_token_ids and (fields.logprobs is None or fields.logprobs is False):
        yield "logprob_token_ids", "only allowed when logprobs is given"
    if fields.logprob_token_ids and getattr(fields, "echo", None):
        yield "logprob_token_ids", "cannot be given together with echo"


def _problems_of_choices(fields: Any, choices: ChoiceCount) -> Iterator[tuple[str, str]]:
    n, num_candidates, use_beam_search = choices.n, choices.num_candidates, choices.use_beam_search
    most = MAX_BEAM_WIDTH if use_beam_search else MAX_SAMPLES
    if n > most:
        yield "n", f"expected `int` <= {most}; got {n}"
    if num_candidates > most:
        yield "best_of", f"expected `int` <= {most}; got {num_candidates}"
    if num_candidates < n:
        yield "best_of", f"expected at least n, which is {n}; got {num_candidates}"
    not_beside = _NEUTRAL_IN_BEAM_SEARCH if use_beam_search else _ONLY_IN_BEAM_SEARCH
    for param, neutral in not_beside.items():
        value = getattr(fields, param, None)
        if value is not None and not is_neutral(value, neutral):
            values = "".join(f", or {allowed!r}" for allowed in neutral)
            where = "with use_beam_search" if use_beam_search else "without use_beam_search"
            yield param, f"has no meaning {where}; leave it out{values}"
