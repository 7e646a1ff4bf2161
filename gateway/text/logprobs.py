"""Log-probabilities as OpenAI's two shapes show them. Pure.

    entry = ScoredTokens(token_bytes).entry(token_id, logprobs, text_offset)     one token of the output
    chat_logprobs(entries)          {"content": [{token, logprob, bytes, top_logprobs: [...]}], "refusal": null}
    completion_logprobs(entries)    {"tokens", "token_logprobs", "top_logprobs", "text_offset"}

A `token` is what its bytes alone decode to, with U+FFFD for parts of a character, or its id where the request asks for
that (`return_tokens_as_token_ids`): `bytes` is exact. The token that ends a sequence is listed in completions, as vLLM
lists it, and in a chat only if its text is shown, as OpenAI has it; every token up to the one that completed a stop
string is.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import msgspec

from gateway.text.token_bytes import TokenBytes
from shared.messages import TokenLogprobs

# OpenAI's stand-in for what has no logarithm: JSON has no infinity.
_LEAST_LOGPROB = -9999.0
_ITEMS_OF_PIECE = 64

_encode = msgspec.json.encode


@dataclass(frozen=True, slots=True)
class ScoredToken:
    token: bytes
    logprob: float | None  # None: of a prompt's first token
    name: str = ""  # in place of its text

    @property
    def text(self) -> str:
        return self.name or self.token.decode(errors="replace")

    def as_object(self) -> dict[str, Any]:
        return {"token": self.text, "logprob": self.logprob, "bytes": list(self.token)}


@dataclass(frozen=True, slots=True)
class LogprobEntry:
    chosen: ScoredToken
    top: tuple[ScoredToken, ...]  # the likeliest, descending
    text_offset: int  # characters of the choice's text before this token


@dataclass(frozen=True, slots=True)
class ScoredTokens:
    """Token ids and their scores -> what is told of them; `by_id`: they are called token_id:123, as in vLLM."""

    token_bytes: TokenBytes
    by_id: bool = False

    def entry(self, token_id: int, logprobs: TokenLogprobs, text_offset: int) -> LogprobEntry:
        top = zip(logprobs.top_token_ids, logprobs.top_logprobs, strict=True)
        return LogprobEntry(
            chosen=self.scored(token_id, logprobs.logprob),
            top=tuple(self.scored(id_, logprob) for id_, logprob in top),
            text_offset=text_offset,
        )

    def scored(self, token_id: int, logprob: float | None) -> ScoredToken:
        shown = None if logprob is None else max(logprob, _LEAST_LOGPROB)
        return ScoredToken(self.token_bytes.of(token_id), shown, f"token_id:{token_id}" if self.by_id else "")


def json_array(items: Iterable[Any]) -> msgspec.Raw:
    """Written piece by piece: as objects, long ones are five times as large, and no other thread may run before all of
    them are written."""
    rest, pieces = iter(items), []
    while piece := list(islice(rest, _ITEMS_OF_PIECE)):
        pieces.append(_encode(piece)[1:-1])
    return msgspec.Raw(b"[" + b",".join(pieces) + b"]")


def chat_logprobs(entries: Iterable[LogprobEntry]) -> dict[str, Any]:
    content = (
        {**entry.chosen.as_object(), "top_logprobs": [token.as_object() for token in entry.top]} for entry in entries
    )
    return {"content": json_array(content), "refusal": None}


def completion_logprobs(entries: Sequence[LogprobEntry]) -> dict[str, Any]:
    """`top_logprobs` has the chosen token too, as OpenAI's; of two tokens of one text it has the likelier."""
    return {
        "tokens": [entry.chosen.text for entry in entries],
        "token_logprobs": [entry.chosen.logprob for entry in entries],
        "top_logprobs": json_array(
            None if entry.chosen.logprob is None else _by_text((*entry.top, entry.chosen)) for entry in entries
        ),
        "text_offset": [entry.text_offset for entry in entries],
    }


def _by_text(tokens: Iterable[ScoredToken]) -> dict[str, float | None]:
    by_text: dict[str, float | None] = {}
    for token in tokens:
        by_text.setdefault(token.text, token.logprob)
    return by_text
