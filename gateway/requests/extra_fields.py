"""Fields beyond OpenAI's that vLLM's users send, flat in the body, with chat and completions alike. Pure.

The types are the validation, as in openai_schema.py; null is the same as absent.
"""

from typing import Annotated, Any, Literal

from msgspec import Meta

from gateway.errors import InvalidRequest
from gateway.requests.token_fields import TokenFields
from shared.messages import MAX_LOGPROBS
from shared.redis_keys import PRIORITY_CLASSES

PRIORITY_HEADER = "x-priority"  # a class by name; for clients that cannot add a field
# What a template is rendered with by the gateway itself; a client's value would stand in for it.
RESERVED_TEMPLATE_NAMES = frozenset(
    ("messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token", "unk_token", "pad_token")
)


class ExtraFields(TokenFields, kw_only=True):
    prompt_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, lt=2**31)] | None = None  # -1: all that fit
    truncation_side: Literal["left", "right"] | None = None  # where it is cut; "left", so that the last are kept
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None  # with logprobs: token_id:123 in place of a token's text
    priority: Annotated[int, Meta(ge=-(2**31), lt=2**31)] | None = None  # lower is earlier
    chat_template_kwargs: dict[str, Any] | None = None


def asked_class(priority: int | None, header: str | None) -> str:
    """There are two classes, so what is below the ordinary 0 gains nothing over it. Raises InvalidRequest."""
    if header is not None:
        if header not in PRIORITY_CLASSES:
            allowed = " or ".join(PRIORITY_CLASSES)
            raise InvalidRequest(f"{PRIORITY_HEADER}: expected {allowed}; got {header[:40]!r}.", param=PRIORITY_HEADER)
        return header
    return PRIORITY_CLASSES[1] if priority is not None and priority > 0 else PRIORITY_CLASSES[0]


def check_extra_fields(fields: ExtraFields, *, stream: bool, use_beam_search: bool) -> None:
    """Raises InvalidRequest."""
    if fields.prompt_logprobs is not None and stream:
        raise InvalidRequest("prompt_logprobs: not available when stream is true.", param="prompt_logprobs")
    if fields.prompt_logprobs is not None and use_beam_search:
        raise InvalidRequest("prompt_logprobs: has no meaning with use_beam_search.", param="prompt_logprobs")
    if fields.truncate_prompt_tokens == 0:
        param = "truncate_prompt_tokens"
        raise InvalidRequest(f"{param}: expected -1, or 1 or more; got 0.", param=param)
    for name in fields.chat_template_kwargs or ():
        if name in RESERVED_TEMPLATE_NAMES:
            param = f"chat_template_kwargs.{name}"
            raise InvalidRequest(f"{param}: is set by the server itself.", param=param)


def truncated(token_ids: list[int], truncate: int | None, side: str | None, room_tokens: int) -> list[int]:
    """`room_tokens`: the longest prompt that leaves room for the answer."""
    if truncate is None:
        return token_ids
    num_kept = truncate if truncate > 0 else max(1, room_tokens)
    return token_ids[:num_kept] if side == "right" else token_ids[-num_kept:]
