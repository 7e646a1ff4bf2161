"""The bytes of single tokens, which together are the bytes of the text. Pure.

A token need not be whole characters, so its own text can be broken where the text of an answer is not; its bytes are
what a client can put together. Covers byte-level vocabularies (GPT-2's alphabet of printable stand-ins) and those of
SentencePiece (`▁` for a space, `<0x0A>` for a byte); in others a token is its own text.
"""

import json
import re

from tokenizers import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


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
            return b"".join(_byte_or_text(character) for character in spelling)
        if byte := _BYTE_TOKEN.fullmatch(spelling):
            return bytes((int(byte[1], 16),))
        return str(spelling).replace("▁", " ").encode()


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's: printable Latin-1 bytes stand for themselves, the others for the characters from 256 on, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(256 + place): byte for place, byte in enumerate(others)}


BYTES_OF_ALPHABET = _byte_alphabet()


def _byte_or_text(character: str) -> bytes:
    return bytes((BYTES_OF_ALPHABET[character],)) if character in BYTES_OF_ALPHABET else character.encode()


def _has_byte_level(tokenizer: Tokenizer) -> bool:
    if tokenizer.decoder is None:
        return False
    decoder = json.loads(tokenizer.decoder.__getstate__())
    steps = decoder.get("decoders", [decoder])  # a Sequence has several
    return any(step.get("type") == "ByteLevel" for step in steps)
