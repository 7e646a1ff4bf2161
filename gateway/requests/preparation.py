"""A CompletionRequest -> the GenerationRequests of the engine: its grammar checked, its texts encoded, its limits kept.

Blocking: what it costs grows with the body, 0.4 us a character, but for what has_more_work() tells of: the worst
grammars take half a second. Most of both is without the interpreter's lock. Pure but for random ids.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from gateway.errors import InvalidRequest
from gateway.requests.generation_fields import Words, truncated, words_token_ids
from gateway.requests.grammar_fields import AskedGrammar
from gateway.requests.openai_schema import ChatPrompt, CompletionRequest, Prompt
from gateway.requests.planning import ModelLimits, context_exceeded, plan_requests
from gateway.text.chat_template import ChatTemplateError
from gateway.text.served_model import ServedModel
from gateway.text.tokenization import PromptEncoder
from shared.grammars import GrammarError, check_grammar
from shared.messages import GenerationRequest, GrammarKind


def check_asked(asked: AskedGrammar | None) -> None:
    """Raises InvalidRequest, with what is wrong in llguidance's words."""
    if asked is None:
        return
    try:
        check_grammar(asked.grammar)
    except GrammarError as error:
        code = "invalid_json_schema" if asked.grammar.kind is GrammarKind.JSON_SCHEMA else "invalid_grammar"
        raise InvalidRequest(f"{asked.param}: {error}.", param=asked.param, code=code) from error


def encode_prompts(model: ServedModel, limits: ModelLimits, request: CompletionRequest) -> list[list[int]]:
    """Raises InvalidRequest."""
    truncate = request.fields.truncate_prompt_tokens
    room_tokens = limits.max_model_len - max(1, request.max_tokens or 1)
    prompts = []
    for prompt in request.prompts:
        checked = limits if truncate is None else None
        token_ids = encode_prompt(model, checked, prompt, request.prompt_param, request.add_special_tokens)
        prompts.append(truncated(token_ids, truncate, request.fields.truncation_side, room_tokens))
    return prompts


def encode_words(model: ServedModel, words: Sequence[str]) -> Words:
    """Of `bad_words`. Raises InvalidRequest."""
    return words_token_ids(words, partial(model.encoder.encode_text, add_special_tokens=False)) if words else ()


def encode_prompt(
    model: ServedModel, limits: ModelLimits | None, prompt: Prompt, param: str, add_special_tokens: bool
) -> list[int]:
    """With `limits`, a text that is sure to be too long is refused before it is encoded."""
    if isinstance(prompt, list):
        return prompt
    encoder = model.encoder
    if isinstance(prompt, str):
        return _encode(encoder, limits, prompt, param, lambda: encoder.encode_text(
            prompt, add_special_tokens=add_special_tokens
        ))  # fmt: skip
    return _encode_chat(encoder, limits, _fitted(prompt, model), param, add_special_tokens)


def _fitted(prompt: ChatPrompt, model: ServedModel) -> ChatPrompt:
    if model.tells_thoughts or not prompt.thinks_only_if_told_apart:
        return prompt
    return replace(prompt, template_kwargs={**prompt.template_kwargs, "enable_thinking": False})


def _encode_chat(
    encoder: PromptEncoder, limits: ModelLimits | None, prompt: ChatPrompt, param: str, add_special_tokens: bool
) -> list[int]:
    render = partial(
        encoder.render_chat,
        prompt.messages,
        add_generation_prompt=prompt.add_generation_prompt,
        continue_final_message=prompt.continue_final_message,
        template_kwargs=prompt.template_kwargs,
        tools=prompt.tools,
    )
    try:
        chat = render()
    except ChatTemplateError as error:
        raise InvalidRequest(f"{param}: {error}.", param=param) from error
    return _encode(
        encoder, limits, chat.text, param, lambda: encoder.encode_chat(chat, add_special_tokens=add_special_tokens)
    )


def _encode(
    encoder: PromptEncoder, limits: ModelLimits | None, text: str, param: str, encode: Callable[[], list[int]]
) -> list[int]:
    least = encoder.least_tokens(text)
    if limits is not None and least >= limits.max_model_len:
        raise context_exceeded(f"at least {least}", param, limits)
    return encode()


_FEW_WORDS = 16  # each is two calls of the tokenizer, 20 us
_FEW_MESSAGES = 64  # a template takes about 8 us a message, and is no code of ours


def has_more_work(request: CompletionRequest) -> bool:
    """Than the size of its body tells."""
    chats = (prompt for prompt in request.prompts if isinstance(prompt, ChatPrompt))
    return (
        bool(request.grammars)
        or len(request.fields.bad_words or ()) > _FEW_WORDS
        or any(len(chat.messages) + len(chat.tools) > _FEW_MESSAGES for chat in chats)
    )


def prepared(
    model: ServedModel,
    limits: ModelLimits,
    request: CompletionRequest,
    tenant: str,
    priority_class: str,
    traceparent: str,
    with_calls: Callable[[CompletionRequest], CompletionRequest],
) -> tuple[CompletionRequest, list[GenerationRequest]]:
    """The request with its bad words as tokens, and what goes to the engine. Raises InvalidRequest.

    `with_calls`: adds to an answer's grammar the calls that may stand in its place."""
    request = _bound(request, with_calls)
    token_ids = encode_prompts(model, limits, request)
    request = replace(request, bad_words=encode_words(model, request.fields.bad_words or ()))
    return request, plan_requests(request, token_ids, limits, tenant, priority_class, traceparent)


def _bound(
    request: CompletionRequest, with_calls: Callable[[CompletionRequest], CompletionRequest]
) -> CompletionRequest:
    """What was asked for is checked before it is put together: errors name what a client wrote."""
    for asked in request.grammars:
        check_asked(asked)
    bound = with_calls(request)
    if bound is not request:
        check_asked(bound.grammar)
    return bound
