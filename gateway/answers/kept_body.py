"""What is stored of a kept answer's body: what its answer is written by, not what its prompt was made of. Pure.

The tokens of a prompt, and what limits the sampling, are in the request that the worker gets. Fields that only made
those are left out, and so are fields without effect and the values of unknown ones: their names are told again with
the answer. The result is a body of its kind, read like any other; a long one is packed.
"""

import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gateway.answers.answer_kinds import AnswerKind
from gateway.requests.request_body import JsonBody

MIN_PACKED_BYTES = 1024  # a shorter one is a fifth of what the store needs for a request anyway
MAX_UNPACKED_BYTES = 16 * 2**20  # eight times the longest body that is read
MAX_TOLD_NAMES, MAX_TOLD_CHARS = 16, 64  # of unknown fields

_SOME_TEXT = "."  # in place of texts that were encoded; some kinds of bodies have no empty ones
_MADE_THE_REQUEST = frozenset(
    (
        "system", "chat_template_kwargs", "add_generation_prompt", "continue_final_message", "add_special_tokens",
        "logit_bias", "allowed_token_ids", "bad_words", "cache_salt",
    )
)  # fmt: skip


def kept_body(kind: AnswerKind, body: JsonBody, ignored: Sequence[str]) -> bytes:
    """`body`: one that was read; `ignored`: the names in it that nobody knows."""
    kept: dict[str, Any] = {}
    for name, value in body.given.items():
        if name in kind.fields and name not in _MADE_THE_REQUEST and value is not None:
            kept[name] = _PROMPTS[name](value, body.given) if name in _PROMPTS else value
    kept |= dict.fromkeys(told_names(ignored))
    return json.dumps(kept, ensure_ascii=False, separators=(",", ":")).encode()


def told_names(names: Sequence[str]) -> list[str]:
    """Of unknown fields. They come from the client: only plain ones may enter a header, and not without end."""
    plain = [name for name in names if name.isascii() and name.isidentifier() and len(name) <= MAX_TOLD_CHARS]
    return plain[:MAX_TOLD_NAMES]


def packed(body: bytes) -> bytes:
    return zlib.compress(body)


def unpacked(data: bytes) -> bytes:
    """Raises ValueError."""
    unpacker = zlib.decompressobj()
    try:
        body = unpacker.decompress(data, MAX_UNPACKED_BYTES)
    except zlib.error as error:
        raise ValueError(str(error)) from error
    if not unpacker.eof:
        raise ValueError(f"cut short, or more than {MAX_UNPACKED_BYTES} bytes")
    return body


def _messages(_: Any, __: Mapping[str, Any]) -> Any:
    return [{"role": "user", "content": _SOME_TEXT}]


def _prompt(prompt: Any, given: Mapping[str, Any]) -> Any:
    """Their number counts, and with `echo` their texts."""
    is_one = isinstance(prompt, str) or isinstance(prompt[0], int)
    return prompt if given.get("echo") else _SOME_TEXT if is_one else [_SOME_TEXT] * len(prompt)


def _input(items: Any, given: Mapping[str, Any]) -> Any:
    """It is listed, and continued."""
    return _SOME_TEXT if given.get("store") is False else items


_PROMPTS: Mapping[str, Callable[[Any, Mapping[str, Any]], Any]] = {
    "messages": _messages, "prompt": _prompt, "input": _input
}  # fmt: skip
