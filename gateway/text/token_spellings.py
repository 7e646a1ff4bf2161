"""The bytes of each token, and how JSON spells it up to the log-probability that follows; made once a token. Pure.

A token need not be whole characters, so its own text can be broken where the text of an answer is not; its bytes are
what a client can put together. Covers byte-level vocabularies (GPT-2's alphabet of printable stand-ins) and those of
SentencePiece (`▁` for a space, `<0x0A>` for a byte); in others a token is its own text.

The text and the bytes of a token never change, and are nearly all there is to write of one: with 20 log-probabilities
a token of an answer is 2 kB. To find and to encode them anew takes 200 us, to put together what is known 10.

A token's way back, where its log-probabilities are asked for. It knows no request and no API.
"""

import json
import re
from collections.abc import Callable, Iterable
from typing import TypeVar

import msgspec
from tokenizers import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
MAX_SPELLED = 65_536  # tokens of each shape, 200 bytes each: those of a text are few of a large vocabulary
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
        """Empty for ids that the tokenizer does not know: the padding of a model's vocabulary."""
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
    """GPT-2's: printable Latin-1 bytes stand for themselves, the others for the characters from 256 on, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(256 + place): byte for place, byte in enumerate(others)}


# Latin-1 that is no letter of the alphabet must not pass for the byte of its number.
_TO_BYTES = {code: "\uffff" for code in range(256)}
_TO_BYTES |= {ord(character): chr(byte) for character, byte in _byte_alphabet().items()}


def bytes_of_spelling(spelling: str) -> bytes:
    """In GPT-2's alphabet. One character outside it, and the tokenizer takes the whole token as text."""
    try:
        return spelling.translate(_TO_BYTES).encode("latin-1")
    except UnicodeEncodeError:
        return spelling.encode()


def _has_byte_level(tokenizer: Tokenizer) -> bool:
    if tokenizer.decoder is None:
        return False
    decoder = json.loads(tokenizer.decoder.__getstate__())
    steps = decoder.get("decoders", [decoder])  # a Sequence has several
    return any(step.get("type") == "ByteLevel" for step in steps)


class SpellingTable(dict[int, _Spelling]):
    """Token id -> its text, or bytes of JSON, found when they are first asked for."""

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
    """`by_id`: tokens are called token_id:123 in place of their text, as in vLLM."""

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
        """The text that its bytes alone decode to, with U+FFFD for parts of a character."""
        return self._token_bytes.of(token_id).decode(errors="replace")

    def _bytes(self, token_id: int) -> bytes:
        return _encode(list(self._token_bytes.of(token_id)))
