"""Token ids -> text for vocabularies of bytes (GPT-2's alphabet), which most models have. Pure.

There the bytes of a text are those of its tokens, one after the other, so Python's own incremental UTF-8 decoder does
the rest: 0.6 us a token, where the tokenizer's stream, which decodes a growing end of the text again, takes 5. Other
tokenizers have rules at word boundaries and go through gateway/tokenization.py.
"""

import codecs
import json

from tokenizers import Tokenizer

from gateway.token_bytes import BYTES_OF_ALPHABET

_utf8_decoder = codecs.getincrementaldecoder("utf-8")


class ByteLevelVocabulary:
    """The bytes of each id, found when first met; shared by all streams of a model."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        special_ids = {id_ for id_, added in tokenizer.get_added_tokens_decoder().items() if added.special}
        self._all = _BytesById(tokenizer, skipped_ids=frozenset())
        self._without_special = _BytesById(tokenizer, skipped_ids=frozenset(special_ids))

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

    def __init__(self, bytes_by_id: "_BytesById") -> None:
        self._bytes_by_id = bytes_by_id
        self._decode = _utf8_decoder("replace").decode

    def push(self, token_id: int) -> str:
        return self._decode(self._bytes_by_id[token_id])

    def flush(self) -> str:
        return self._decode(b"", True)


class _BytesById(dict[int, bytes]):
    def __init__(self, tokenizer: Tokenizer, skipped_ids: frozenset[int]) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._skipped_ids = skipped_ids

    def __missing__(self, token_id: int) -> bytes:
        spelling = None if token_id in self._skipped_ids else self._tokenizer.id_to_token(token_id)
        found = self[token_id] = b"" if spelling is None else _bytes_of(spelling)
        return found


def _bytes_of(spelling: str) -> bytes:
    """One character outside the alphabet, and the tokenizer takes the whole token as text."""
    try:
        return bytes(BYTES_OF_ALPHABET[character] for character in spelling)
    except KeyError:
        return spelling.encode()
