"""Prompts of a request -> token ids, no longer than the model's context; and its bad words. Blocking: 0.4 us a
character, most of it without the interpreter's lock.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from gateway.errors import InvalidRequest
from gateway.requests.extra_fields import truncated
from gateway.requests.openai_schema import ChatPrompt, CompletionRequest, Prompt
from gateway.requests.planning import ModelLimits, context_exceeded
from gateway.requests.token_fields import Words, words_token_ids
from gateway.text.chat_template import ChatTemplateError
from gateway.text.served_model import ServedModel
from gateway.text.tokenization import PromptEncoder


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
