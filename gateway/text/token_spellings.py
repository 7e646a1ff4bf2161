"""The bytes of each token and its JSON up to the log-probability, computed once per token. Pure.

A token may be part of a character, so only its bytes are exact. Supported are byte-level vocabularies (GPT-2's
alphabet) and SentencePiece (`▁` for a space, `<0x0A>` for a byte); in other vocabularies a token is its own text.
Caching matters: with 20 log-probabilities a token of an answer is 2 kB, which takes 200 us to encode and 10 us to join
from the cache.
"""

import json
import re
from collections.abc import Callable, Iterable
from typing import TypeVar

import msgspec
from tokenizers import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
MAX_SPELLED = 65_536  # cached tokens per format, 200 bytes each; texts use few tokens of a large vocabulary
_encode = msgspec.json.encode
_Spelling = TypeVar("_Spelling", bytes, str)


class TokenBytes:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._is_byte_level = _has_byte_level(tokenizer)
        self._added = {
            token_id: added.content.encode() for token_id, added in tokenizer.get_added_tokens_decoder().items()
        }

    def of(self, token_id: int) -> bytes:
        """Return the bytes of a token; empty for ids beyond the tokenizer, which pad a model's vocabulary."""
        if token_id in self._added:
            return self._added[token_id]
        spelling = self._tokenizer.id_to_token(token_id)
        if spelling is None:
            return b""
        if self._is_byte_level:
            return bytes_of_spelling(spelling)
        if byte := _BYTE_TOKEN.fullmatch(spelling):
            return bytes((int(byte[1], 16),))
        return str(spelling).replace("▁", " ").encode()


def _byte_alphabet() -> dict[str, int]:
    """Return GPT-2's alphabet: printable Latin-1 bytes map to themselves, the others to characters from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(256 + place): byte for place, byte in enumerate(others)}


# Latin-1 characters outside the alphabet must not be taken for the byte with their number.
_TO_BYTES = {code: "\uffff" for code in range(256)}
_TO_BYTES |= {ord(character): chr(byte) for character, byte in _byte_alphabet().items()}


def bytes_of_spelling(spelling: str) -> bytes:
    """Return the bytes of a token in GPT-2's alphabet; with any other character the token is plain text."""
    try:
        return spelling.translate(_TO_BYTES).encode("latin-1")
    except UnicodeEncodeError:
        return spelling.encode()


def _has_byte_level(tokenizer: Tokenizer) -> bool:
    if tokenizer.decoder is None:
        return False
    decoder = json.loads(tokenizer.decoder.__getstate__())
    steps = decoder.get("decoders", [decoder])  # a Sequence contains several decoders
    return any(step.get("type") == "ByteLevel" for step in steps)


class SpellingTable(dict[int, _Spelling]):
    """Cache from token id to its text or JSON, filled on first use."""

    def __init__(self, spell: Callable[[int], _Spelling]) -> None:
        super().__init__()
        self._spell: Callable[[int], _Spelling] = spell

    def __missing__(self, token_id: int) -> _Spelling:
        if len(self) >= MAX_SPELLED:
            self.clear()
        spelled = self[token_id] = self._spell(token_id)
        return spelled

    def all_of(self, token_ids: Iterable[int]) -> list[_Spelling]:
        return list(map(self.__getitem__, token_ids))


class TokenSpellings:
    """Cached JSON of tokens. With `by_id`, a token is written as token_id:123 instead of its text, as in vLLM."""

    def __init__(self, token_bytes: TokenBytes, *, by_id: bool = False) -> None:
        self._token_bytes = token_bytes
        self._by_id = by_id
        self.texts = SpellingTable(self._text)
        self.tokens = SpellingTable(lambda id_: b'},{"token":%b,"logprob":' % _encode(self._text(id_)))
        self.tokens_with_bytes = SpellingTable(
            lambda id_: b'},{"token":%b,"bytes":%b,"logprob":' % (_encode(self._text(id_)), self._bytes(id_))
        )
        self.decoded_by_id = SpellingTable(
            lambda id_: b'"%d":{"decoded_token":%b,"logprob":' % (id_, _encode(self._decoded(id_)))
        )

    def _text(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._by_id else self._decoded(token_id)

    def _decoded(self, token_id: int) -> str:
        """Return the decoded bytes of the token alone, with U+FFFD for parts of a character."""
        return self._token_bytes.of(token_id).decode(errors="replace")

    def _bytes(self, token_id: int) -> bytes:
        return _encode(list(self._token_bytes.of(token_id)))
