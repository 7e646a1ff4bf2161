"""Planning: a CompletionRequest becomes engine requests with checked grammars, encoded prompts, and checked limits.

It checks what needs the model: context length, token ids, and pairs of fields after defaults are filled in. Each prompt
becomes one request with all its choices and a random id. Pure except for these ids.

It blocks: about 0.4 us per character of the body, except for the cases of has_more_work(); the worst grammars take half
a second. Most of that time is spent without the interpreter lock.
"""

import secrets
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from msgspec import structs

from gateway.errors import ContextLengthExceeded, InvalidRequest
from gateway.pipeline.call_grammar import answer_or_calls
from gateway.pipeline.fields import GenerationFields, check_something_is_allowed, truncated, words_token_ids
from gateway.pipeline.grammar import AskedGrammar
from gateway.pipeline.harmony_grammar import in_channels
from gateway.pipeline.prefix_key import prefix_key
from gateway.pipeline.request import CompletionRequest, FilledPrompt, Prompt
from gateway.text.chat_template import ChatTemplateError, TemplateOptions
from gateway.text.parsers.formats import HARMONY
from gateway.text.served_model import ModelLimits, ServedModel
from gateway.text.tokenization import PromptEncoder
from shared.choice_seeds import SEED_BITS
from shared.grammars import GrammarError, check_grammar
from shared.messages import GenerationRequest, Grammar, GrammarKind, Pooling, SamplingParams
from shared.model_files import Task

# Tokens of one answer plus all their log-probabilities. Prompts, choices, tokens, and log-probabilities have limits of
# their own, but the journal, the gateway, and the body hold their product. A value takes about 14 bytes of journal, 70
# of body, and 300 of memory while the body is built: 2**19 are a tenth of the longest journal, and 150 MB here.
MAX_VALUES = 2**19
MAX_VECTOR_VALUES = 2**21  # of the vectors of one answer: 44 MB of JSON numbers, 11 MB of base64
# Grammar, allowed tokens, and bad words are sent once and stored with the request of each prompt. The limit for all
# prompts together is twice the longest body.
MAX_RULE_BYTES = 4 * 2**20
_BYTES_OF_ID = 5  # longest form in MessagePack
# Dividing logits by less overflows; vLLM uses the same threshold.
_GREEDY_BELOW_TEMPERATURE = 1e-5
# Fields that the engine receives unchanged.
_AS_GIVEN = frozenset(SamplingParams.__struct_fields__) & frozenset(GenerationFields.__struct_fields__)
_FEW_WORDS = 16  # each is two calls of the tokenizer, 20 us
_FEW_PAIRS = 8  # each is encoded with an instruction of 400 characters, 140 us
_FEW_MESSAGES = 64  # a template takes about 8 us per message


def prepared(
    model: ServedModel, limits: ModelLimits, request: CompletionRequest
) -> tuple[CompletionRequest, list[GenerationRequest]]:
    """Return the request with encoded bad words, and the engine requests, of no sender yet; raise InvalidRequest."""
    request = with_defaults(_bound(request, model), model.defaults)
    if request.task is Task.SCORE:
        request = _with_answers(request, model)
    elif request.pooling is not None:
        _check_dimensions(request.pooling, len(request.prompts), model)
    token_ids = encode_prompts(model, limits, request)
    if request.fields.bad_words:
        encode = partial(model.encoder.encode_text, add_special_tokens=False)
        request = structs.replace(request, bad_words=words_token_ids(request.fields.bad_words, encode))
    planned = plan_requests(request, token_ids, limits)
    if request.must_think and model.reasoning is None:
        raise InvalidRequest(
            "thinking: no reasoning parser is configured for this model; remove it or use disabled.",
            param="thinking",
        )
    return request, planned


def _with_answers(request: CompletionRequest, model: ServedModel) -> CompletionRequest:
    """Ask for the log-probabilities of the model's tokens for no and yes."""
    token_ids = [model.encoder.encode_text(token, add_special_tokens=False) for token in model.answers]
    if any(len(ids) != 1 for ids in token_ids):
        raise InvalidRequest(
            f"model: {model.answers[0]!r} and {model.answers[1]!r} must be single tokens of a model that scores; set "
            "classifier_from_token in its config.json.",
            param="model",
        )
    asked = [ids[0] for ids in token_ids]
    return structs.replace(request, fields=structs.replace(request.fields, logprob_token_ids=asked))


def _check_dimensions(pooling: Pooling, num_prompts: int, model: ServedModel) -> None:
    """Raise InvalidRequest if the vectors are longer than the model's, or too many."""
    size = model.hidden_size
    if size and pooling.dimensions > size:
        raise InvalidRequest(
            f"dimensions: expected at most {size}, the size of this model's vectors; got {pooling.dimensions}.",
            param="dimensions",
        )
    num_values = num_prompts * (pooling.dimensions or size)
    if num_values > MAX_VECTOR_VALUES:
        raise InvalidRequest(
            f"input: {num_prompts} vectors have {num_values} values; at most {MAX_VECTOR_VALUES} in one request. Send "
            "fewer inputs or set dimensions.",
            param="input",
        )


def has_more_work(request: CompletionRequest) -> bool:
    """Return whether planning may cost more than the body size suggests."""
    first = request.prompts[0]
    num_parts = len(first) + len(request.template.get("tools", ())) if isinstance(first, tuple) else 0
    if num_parts > _FEW_MESSAGES or (request.task is Task.SCORE and len(request.prompts) > _FEW_PAIRS):
        return True
    return bool(request.grammars) or len(request.fields.bad_words or ()) > _FEW_WORDS


def with_defaults(request: CompletionRequest, defaults: Mapping[str, Any]) -> CompletionRequest:
    """Fill in the model's sampling defaults; a beam search does not sample and stays unchanged."""
    if request.choices.use_beam_search or not defaults:
        return request
    left_open = {name: value for name, value in defaults.items() if getattr(request.fields, name, 0) is None}
    return structs.replace(
        request,
        fields=structs.replace(request.fields, **left_open),
        default_max_tokens=request.default_max_tokens or defaults.get("max_new_tokens"),
    )


def _bound(request: CompletionRequest, model: ServedModel) -> CompletionRequest:
    """Check the grammars, then combine them with tool calls and with the model's message format.

    The check comes first so that errors name the client's fields.
    """
    for asked in request.grammars:
        check_asked(asked)
    if request.is_chat and request.grammars and model.calls.name == HARMONY:
        return _with_grammar(request, _harmony_grammar(request, model), request.grammars[0].param)
    if not request.may_answer_or_call:
        return request
    assert request.answer_grammar is not None and request.tools is not None
    family, special_id = model.calls.in_grammar, model.encoder.special_id
    both = answer_or_calls(request.answer_grammar.grammar, request.tools, family, special_id)
    return _with_grammar(request, both, "tools")


def _with_grammar(request: CompletionRequest, grammar: Grammar, param: str) -> CompletionRequest:
    bound = structs.replace(request, grammar=AskedGrammar(grammar, param))
    check_asked(bound.grammar)
    return bound


def _harmony_grammar(request: CompletionRequest, model: ServedModel) -> Grammar:
    tools = request.tools
    if tools is None:
        return in_channels(request.grammars[0].grammar, {}, model.encoder.special_id)
    schemas = tools.schemas
    named = {tools.name: schemas[tools.name]} if tools.mode == "named" else schemas
    answer = request.answer_grammar if tools.mode == "auto" else None
    return in_channels(None if answer is None else answer.grammar, named, model.encoder.special_id)


def check_asked(asked: AskedGrammar | None) -> None:
    """Raise InvalidRequest with llguidance's message if the grammar is invalid."""
    if asked is None:
        return
    try:
        check_grammar(asked.grammar)
    except GrammarError as error:
        code = "invalid_json_schema" if asked.grammar.kind is GrammarKind.JSON_SCHEMA else "invalid_grammar"
        raise InvalidRequest(f"{asked.param}: {error}.", param=asked.param, code=code) from error


def encode_prompts(model: ServedModel, limits: ModelLimits, request: CompletionRequest) -> list[list[int]]:
    """Return the token ids of all prompts, truncated if requested; raise InvalidRequest."""
    truncate = request.fields.truncate_prompt_tokens
    room_tokens = limits.max_model_len - max(1, request.max_tokens or 1)
    prompts, template = [], _template_options(request, model)
    for prompt in request.prompts:
        checked = limits if truncate is None else None
        token_ids = encode_prompt(model, checked, prompt, request.prompt_param, request.add_special_tokens, template)
        if truncate is not None:
            token_ids = truncated(token_ids, truncate, request.fields.truncation_side, room_tokens)
        prompts.append(token_ids)
    return prompts


def encode_prompt(
    model: ServedModel,
    limits: ModelLimits | None,
    prompt: Prompt,
    param: str,
    add_special_tokens: bool,
    template: TemplateOptions | None = None,
) -> list[int]:
    """Return the token ids of one prompt.

    Args:
        model: Model with the tokenizer and template.
        limits: If given, a text that is certainly too long is refused before it is encoded.
        prompt: Messages, text, token ids, or a template of this server with texts.
        param: Field to name in errors.
        add_special_tokens: Whether the tokenizer adds its special tokens.
        template: Options of a chat.

    Raises:
        InvalidRequest: If the template fails or the text is too long.
    """
    if isinstance(prompt, list):
        return prompt
    encoder, check = model.encoder, partial(_check_text, model.encoder, limits, param)
    if isinstance(prompt, str):
        check(prompt)
        return encoder.encode_text(prompt, add_special_tokens=add_special_tokens)
    if isinstance(prompt, FilledPrompt):
        return encoder.encode_filled(prompt.template, prompt.texts, check=check)
    try:
        return encoder.encode_chat(prompt, add_special_tokens=add_special_tokens, check=check, **(template or {}))
    except ChatTemplateError as error:
        raise InvalidRequest(f"{param}: {error}.", param=param) from error


def _check_text(encoder: PromptEncoder, limits: ModelLimits | None, param: str, text: str) -> None:
    least = encoder.min_num_tokens(text)
    if limits is not None and least >= limits.max_model_len:
        raise context_exceeded(least, param, limits, is_lower_bound=True)


def _template_options(request: CompletionRequest, model: ServedModel) -> TemplateOptions:
    if model.reasoning is not None or not request.reasons_only_if_parsed:
        return request.template
    kwargs = {**request.template["template_kwargs"], "enable_thinking": False}
    return TemplateOptions(**{**request.template, "template_kwargs": kwargs})


def plan_requests(
    request: CompletionRequest, prompts_token_ids: Sequence[list[int]], limits: ModelLimits
) -> list[GenerationRequest]:
    """Return one engine request per prompt, each with all its choices, in the order of the prompts."""
    if len(request.prompts) > 1:
        _check_rules(request)
    if request.choices.use_beam_search:
        _check_beam_width(request, limits)
    planned, limit = [], max_answer_tokens(request, prompts_token_ids)
    for prompt, token_ids in zip(request.prompts, prompts_token_ids, strict=True):
        check_prompt(token_ids, request.prompt_param, limits)
        max_tokens = max(1, _max_tokens(request, len(token_ids), limits, limit))  # for 0 see answer_extras.py
        generation = GenerationRequest(
            request_id=secrets.token_hex(16),
            prompt_token_ids=token_ids,
            sampling=_sampling_params(request, max_tokens, limits),
            cache_salt=request.fields.cache_salt or "",
            pooling=request.pooling,
            prefix_key=prefix_key(request, prompt, token_ids),
        )
        planned.append(generation)
    return planned


def _check_beam_width(request: CompletionRequest, limits: ModelLimits) -> None:
    """Raise InvalidRequest for a search that is too wide for the smallest worker."""
    choices, limit = request.choices, limits.max_beam_width
    if limit is not None and choices.num_candidates > limit:
        param = "n" if choices.num_candidates == choices.n else "best_of"
        raise InvalidRequest(
            f"{param}: a beam search of width {choices.num_candidates}; expected at most {limit}, half of a worker's "
            "--max-num-seqs.",
            param=param,
        )


def _check_rules(request: CompletionRequest) -> None:
    """Raise InvalidRequest if grammar, allowed tokens, and bad words of all prompts together are too long."""
    grammar = len(request.grammar.grammar.text.encode()) if request.grammar else 0
    num_ids = len(request.fields.allowed_token_ids or ()) + sum(map(len, request.bad_words))
    num_prompts, of_each = len(request.prompts), grammar + _BYTES_OF_ID * num_ids
    if num_prompts * of_each > MAX_RULE_BYTES:
        raise InvalidRequest(
            f"{request.prompt_param}: {num_prompts} prompts, each with {of_each} bytes of grammar, allowed_token_ids "
            f"and bad_words; at most {MAX_RULE_BYTES // of_each} such prompts per request.",
            param=request.prompt_param,
        )


def check_prompt(token_ids: Sequence[int], param: str, limits: ModelLimits) -> None:
    if not token_ids:
        raise InvalidRequest(f"{param}: has no tokens; expected at least one.", param=param)
    _check_token_ids(token_ids, param, limits)
    if len(token_ids) >= limits.max_model_len:
        raise context_exceeded(len(token_ids), param, limits)


def context_exceeded(
    num_tokens: int, param: str, limits: ModelLimits, *, is_lower_bound: bool = False
) -> ContextLengthExceeded:
    """Return the error for a prompt that is too long."""
    count = f"at least {num_tokens}" if is_lower_bound else str(num_tokens)
    return ContextLengthExceeded(
        f"This model's maximum context length is {limits.max_model_len} tokens, of which at least one is for the "
        f"answer. However, your {param} resulted in {count} tokens. Please reduce its length.",
        param=param,
        prompt_tokens=num_tokens,
        limit=limits.max_model_len,
        is_lower_bound=is_lower_bound,
    )


def max_answer_tokens(request: CompletionRequest, prompts_token_ids: Sequence[list[int]]) -> int:
    """Return the maximum number of tokens per choice, at least 1, within MAX_VALUES.

    Raises:
        InvalidRequest: If the values returned for the prompts leave no room for an answer.
    """
    num_prompt_values = _num_prompt_values(request, sum(map(len, prompts_token_ids)))
    num_choices = len(request.prompts) * request.choices.num_sent
    limit = (MAX_VALUES - num_prompt_values) // (num_choices * _values_of_token(request))
    if limit < 1:
        param = "prompt_logprobs" if request.fields.prompt_logprobs is not None else request.prompt_param
        raise InvalidRequest(
            f"{param}: prompts of {sum(map(len, prompts_token_ids))} tokens with their log-probabilities are "
            f"{num_prompt_values} values; an answer has at most {MAX_VALUES}. Send fewer prompts or request fewer "
            "log-probabilities.",
            param=param,
        )
    return limit


def _max_tokens(request: CompletionRequest, num_prompt_tokens: int, limits: ModelLimits, limit: int) -> int:
    room = limits.max_model_len - num_prompt_tokens
    if request.max_tokens is None:
        return min(room, request.default_max_tokens or room, limit)
    if request.max_tokens > room:
        raise ContextLengthExceeded(
            f"This model's maximum context length is {limits.max_model_len} tokens. However, you requested "
            f"{num_prompt_tokens + request.max_tokens} tokens ({num_prompt_tokens} in the {request.prompt_param}, "
            f"{request.max_tokens} in the completion). Please reduce the length of either.",
            param=request.max_tokens_param,
            prompt_tokens=num_prompt_tokens,
            max_tokens=request.max_tokens,
            limit=limits.max_model_len,
        )
    if request.max_tokens > limit:
        param, num_choices = request.max_tokens_param, len(request.prompts) * request.choices.num_sent
        raise InvalidRequest(
            f"{param}: {request.max_tokens} tokens x {num_choices} choices x {_values_of_token(request)} values "
            f"(token and log-probabilities) exceed {MAX_VALUES} values per answer; at most {limit} tokens here.",
            param=param,
        )
    return request.max_tokens


def _values_of_token(request: CompletionRequest) -> int:
    """Return the values per token: the token, its log-probability, and those of other tokens."""
    if request.num_logprobs is None:
        return 2 if request.choices.is_best_of else 1
    return 2 + max(request.num_logprobs, len(request.fields.logprob_token_ids or ()))


def _num_prompt_values(request: CompletionRequest, num_tokens: int) -> int:
    """Return the values for the prompts; each choice of a text completion repeats them."""
    scores = request.num_prompt_logprobs
    if scores is None and not request.echo and not request.fields.return_token_ids:
        return 0
    times = 1 if request.is_chat else request.n
    return num_tokens * times * (1 if scores is None else 2 + scores)


def _sampling_params(request: CompletionRequest, max_tokens: int, limits: ModelLimits) -> SamplingParams:
    fields, choices = request.fields, request.choices
    min_tokens = fields.min_tokens or 0
    if min_tokens > max_tokens:
        raise InvalidRequest(
            f"min_tokens: {min_tokens} is more than max_tokens, which is {max_tokens} here.", param="min_tokens"
        )
    stop_token_ids = tuple(fields.stop_token_ids or ())
    _check_token_ids(stop_token_ids, "stop_token_ids", limits)
    allowed = None if fields.allowed_token_ids is None else tuple(dict.fromkeys(fields.allowed_token_ids))
    named = tuple(dict.fromkeys(fields.logprob_token_ids or ()))
    _check_token_ids(allowed or (), "allowed_token_ids", limits)
    _check_token_ids(named, "logprob_token_ids", limits)
    check_something_is_allowed(allowed, request.bad_words)
    temperature = 1.0 if fields.temperature is None else fields.temperature
    made = {
        "max_tokens": max_tokens,
        "seed": secrets.randbits(SEED_BITS) if fields.seed is None else fields.seed & ((1 << SEED_BITS) - 1),
        "n": choices.num_sent,
        "use_beam_search": choices.use_beam_search,
        "beam_width": choices.num_candidates if choices.use_beam_search else 0,
        "temperature": 0.0 if choices.use_beam_search or temperature < _GREEDY_BELOW_TEMPERATURE else temperature,
        "top_k": max(0, fields.top_k or 0),
        "logit_bias": _logit_bias(fields, limits),
        "stop_token_ids": stop_token_ids,
        "grammar": request.grammar.grammar if request.grammar else None,
        "allowed_token_ids": allowed,
        "bad_words": request.bad_words,
        "logprobs": _num_logprobs(request),
        "logprob_token_ids": named,
        "prompt_logprobs": request.num_prompt_logprobs,
    }
    as_given = {name: getattr(fields, name) for name in _AS_GIVEN - made.keys()}
    return SamplingParams(**{name: value for name, value in as_given.items() if value is not None} | made)


def _num_logprobs(request: CompletionRequest) -> int | None:
    if request.num_logprobs is None:
        return 0 if request.choices.is_best_of else None
    return 0 if request.fields.logprob_token_ids else request.num_logprobs


def _logit_bias(fields: GenerationFields, limits: ModelLimits) -> dict[int, float]:
    biases = {}
    for key, bias in (fields.logit_bias or {}).items():
        if not (key.isascii() and key.isdecimal() and len(key) < 10 and int(key) < limits.vocab_size):
            raise InvalidRequest(
                f"logit_bias: key {key[:20]!r} is not a token id; expected 0..{limits.vocab_size - 1}.",
                param="logit_bias",
            )
        biases[int(key)] = float(bias)
    return biases


def _check_token_ids(token_ids: Sequence[int], param: str, limits: ModelLimits) -> None:
    if token_ids and max(token_ids) >= limits.vocab_size:
        raise InvalidRequest(
            f"{param}: {max(token_ids)} is not a token id; expected 0..{limits.vocab_size - 1}.", param=param
        )
