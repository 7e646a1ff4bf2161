"""The key of a prompt's beginning: requests with equal keys prefer the worker that has the beginning cached. Pure.

It covers a conversation up to its first user message, so that all its turns have one key, and other conversations with
the same system message have others.
"""

from collections.abc import Sequence
from hashlib import blake2b
from itertools import takewhile

import msgspec

from gateway.pipeline.request import CompletionRequest, Prompt

MIN_TOKENS = 128  # of a prompt with a key; computing fewer again costs less than an uneven load
PREFIX_TOKENS = 256  # of a prompt without messages
_KEY_BYTES = 8


def prefix_key(request: CompletionRequest, prompt: Prompt, token_ids: Sequence[int]) -> bytes:
    """Return the key of one prompt of the request, or b"" for a short one; `token_ids` are its tokens."""
    if len(token_ids) < MIN_TOKENS:
        return b""
    if request.fields.prompt_cache_key:
        beginning: object = request.fields.prompt_cache_key
    elif isinstance(prompt, tuple):
        before = list(takewhile(lambda message: message["role"] != "user", prompt))
        beginning = [request.template.get("tools"), prompt[: len(before) + 1]]
    else:
        beginning = token_ids[:PREFIX_TOKENS]
    data = msgspec.json.encode([request.fields.cache_salt, beginning])
    return blake2b(data, digest_size=_KEY_BYTES).digest()
