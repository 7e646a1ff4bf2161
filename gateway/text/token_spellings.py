"""How JSON spells each token of a vocabulary, up to the log-probability that follows it. Made once a token. Pure.

The text and the bytes of a token never change, and are nearly all there is to write of one: with 20 log-probabilities
a token of an answer is 2 kB. To find and to encode them anew takes 200 us, to put together what is known 10.
"""

from collections.abc import Callable, Iterable

import msgspec

from gateway.text.token_bytes import TokenBytes

MAX_SPELLED = 65_536  # tokens of each shape, 200 bytes each: those of a text are few of a large vocabulary

_encode = msgspec.json.encode


class SpellingTable(dict[int, bytes]):
    """Token id -> bytes of JSON, found when they are first asked for."""

    def __init__(self, spell: Callable[[int], bytes]) -> None:
        super().__init__()
        self._spell = spell

    def __missing__(self, token_id: int) -> bytes:
        if len(self) >= MAX_SPELLED:
            self.clear()
        spelled = self[token_id] = self._spell(token_id)
        return spelled

    def all_of(self, token_ids: Iterable[int]) -> list[bytes]:
        return list(map(self.__getitem__, token_ids))


class TokenSpellings:
    """`by_id`: tokens are called token_id:123 in place of their text, as in vLLM."""

    def __init__(self, token_bytes: TokenBytes, *, by_id: bool = False) -> None:
        self._token_bytes = token_bytes
        self._by_id = by_id
        self.texts = SpellingTable(self._text)
        self.keys = SpellingTable(lambda id_: b"," + self._text(id_) + b":")
        self.tokens = SpellingTable(lambda id_: b'},{"token":' + self._text(id_) + b',"logprob":')
        self.tokens_with_bytes = SpellingTable(
            lambda id_: b'},{"token":' + self._text(id_) + b',"bytes":' + self._bytes(id_) + b',"logprob":'
        )
        self.decoded_by_id = SpellingTable(
            lambda id_: b',"%d":{"decoded_token":%b,"logprob":' % (id_, self._decoded(id_))
        )

    def _text(self, token_id: int) -> bytes:
        return b'"token_id:%d"' % token_id if self._by_id else self._decoded(token_id)

    def _decoded(self, token_id: int) -> bytes:
        """What its bytes alone decode to, with U+FFFD for parts of a character."""
        return _encode(self._token_bytes.of(token_id).decode(errors="replace"))

    def _bytes(self, token_id: int) -> bytes:
        return _encode(list(self._token_bytes.of(token_id)))
