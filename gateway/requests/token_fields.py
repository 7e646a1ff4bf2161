"""Fields that name tokens, with vLLM's meaning. Pure.

    allowed_token_ids    no other token is ever sampled; the end of a text is one of them only if it is named
    bad_words            texts that the output never has, at its beginning or behind a space
    logprob_token_ids    with logprobs: those of these tokens at every place, in this order, in place of the likeliest

A word is forbidden as the tokens that the tokenizer makes of it, with and without a space before it; what spells it in
other tokens is not found. vLLM forbids the form with a space only where it has as many tokens as the one without.
"""

from collections.abc import Callable, Iterable
from typing import Annotated, Any, TypeAlias

from msgspec import Meta

from gateway.errors import InvalidRequest
from gateway.requests.grammar_fields import GrammarFields

TokenId: TypeAlias = Annotated[int, Meta(ge=0, lt=2**31)]
_Word: TypeAlias = Annotated[str, Meta(min_length=1, max_length=256)]
Words: TypeAlias = tuple[tuple[int, ...], ...]


class TokenFields(GrammarFields, kw_only=True):
    allowed_token_ids: Annotated[list[TokenId], Meta(min_length=1)] | None = None
    bad_words: Annotated[list[_Word], Meta(max_length=500)] | None = None  # of two forms each: vLLM's limit, 1000
    logprob_token_ids: Annotated[list[TokenId], Meta(max_length=128)] | None = None  # vLLM's limit


def check_token_fields(fields: Any) -> None:
    """`fields`: those of a chat or of a completion. Raises InvalidRequest."""
    if not fields.logprob_token_ids:
        return
    param = "logprob_token_ids"
    if fields.logprobs is None or fields.logprobs is False:
        raise InvalidRequest(f"{param}: only allowed when logprobs is given.", param=param)
    if getattr(fields, "echo", None):
        raise InvalidRequest(f"{param}: cannot be given together with echo.", param=param)


def words_token_ids(words: Iterable[str], encode: Callable[[str], list[int]]) -> Words:
    """`encode`: without special tokens. Raises InvalidRequest."""
    found: dict[tuple[int, ...], None] = {}
    for index, word in enumerate(words):
        bare = word.lstrip()
        forms = [tuple(encode(form)) for form in (bare, f" {bare}")] if bare else [tuple(encode(word))]
        if not forms[0]:
            param = f"bad_words[{index}]"
            raise InvalidRequest(f"{param}: {word!r} has no tokens.", param=param)
        found |= dict.fromkeys(form for form in forms if form)
    return tuple(found)


def check_something_is_allowed(allowed: tuple[int, ...] | None, words: Words) -> None:
    """Raises InvalidRequest where every allowed token is a bad word by itself."""
    if allowed is not None and {(token_id,) for token_id in allowed} <= set(words):
        raise InvalidRequest("bad_words: forbid every one of allowed_token_ids.", param="bad_words")
