"""Token ids -> text for vocabularies of bytes (GPT-2's alphabet), which most models have. Pure.

There the bytes of a text are those of its tokens, one after the other, so Python's own incremental UTF-8 decoder does
the rest: 0.6 us a token, where the tokenizer's stream, which decodes a growing end of the text again, takes 5. Other
tokenizers have rules at word boundaries and go through gateway/text/tokenization.py.

A token's way back, in the gateway: tokenization.py chooses this decoder for a stream of tokens. It knows nothing of
stop strings, templates or requests.
"""

import codecs
import json
from collections.abc import Mapping

from tokenizers import Tokenizer

from gateway.text.token_bytes import BYTES_OF_ALPHABET

_utf8_decoder = codecs.getincrementaldecoder("utf-8")


_BYTE_OF = {ord(character): chr(byte) for character, byte in BYTES_OF_ALPHABET.items()}
# Latin-1 that is no letter of the alphabet must not pass for the byte of its number.
_TO_BYTES = {code: "\uffff" for code in range(256)} | _BYTE_OF


class ByteLevelVocabulary:
    """The bytes of each id, shared by all streams of a model."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Takes 0.2 s for 50,000 tokens; found one by one, each would cost its first reader as much as ten others."""
        self._all = {id_: _bytes_of(spelling) for spelling, id_ in tokenizer.get_vocab().items()}
        special_ids = [id_ for id_, added in tokenizer.get_added_tokens_decoder().items() if added.special]
        self._without_special = self._all | dict.fromkeys(special_ids, b"")

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "ByteLevelVocabulary | None":
        """None unless bytes are all there is to decoding: a sequence of decoders may strip or replace as well."""
        decoder = tokenizer.decoder
        if decoder is None or json.loads(decoder.__getstate__()).get("type") != "ByteLevel":
            return None
        return cls(tokenizer)

    def detokenizer(self, *, skip_special_tokens: bool) -> "ByteLevelDetokenizer":
        return ByteLevelDetokenizer(self._without_special if skip_special_tokens else self._all)


class ByteLevelDetokenizer:
    """The pieces joined are what decoding all ids at once gives, broken UTF-8 included (U+FFFD)."""

    def __init__(self, bytes_by_id: Mapping[int, bytes]) -> None:
        self._bytes_by_id = bytes_by_id
        self._decode = _utf8_decoder("replace").decode

    def push(self, token_id: int) -> str:
        return self._decode(self._bytes_by_id.get(token_id, b""))  # ids that the tokenizer does not know are no text

    def flush(self) -> str:
        return self._decode(b"", True)


def _bytes_of(spelling: str) -> bytes:
    """One character outside the alphabet, and the tokenizer takes the whole token as text."""
    try:
        return spelling.translate(_TO_BYTES).encode("latin-1")
    except UnicodeEncodeError:
        return spelling.encode()
