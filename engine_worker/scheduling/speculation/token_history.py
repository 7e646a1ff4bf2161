"""Token ids in an array that grows, and the search for where some of them occurred before."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine_worker.kv.sequence import Sequence

Int32Array = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Match:
    length: int  # tokens that are equal; 0: none
    end: int  # the index behind them


class TokenHistory:
    def __init__(self) -> None:
        self._tokens: Int32Array = np.zeros(0, dtype=np.int32)
        self._length = 0

    def follow(self, sequence: Sequence) -> None:
        """Append the known tokens of `sequence` that are new since the last call."""
        self.append(sequence.token_ids(self._length, sequence.num_known_tokens))

    def append(self, token_ids: list[int]) -> None:
        length = self._length + len(token_ids)
        if length > len(self._tokens):
            grown: Int32Array = np.zeros(2 * length, dtype=np.int32)
            grown[: self._length] = self._tokens[: self._length]
            self._tokens = grown
        self._tokens[self._length : length] = token_ids
        self._length = length

    def keep_last(self, num_tokens: int) -> None:
        """Drop older tokens, half of them at once, so that this is cheap on average."""
        if self._length > 2 * num_tokens:
            self._tokens = self._tokens[self._length - num_tokens : self._length].copy()
            self._length = num_tokens

    def last(self, num_tokens: int) -> Int32Array:
        """Return the last tokens, at most `num_tokens`."""
        return self._tokens[max(0, self._length - num_tokens) : self._length]

    def after(self, end: int, num_tokens: int) -> list[int]:
        """Return the tokens from index `end` on, at most `num_tokens`."""
        found: list[int] = self._tokens[end : min(end + num_tokens, self._length)].tolist()
        return found

    def longest_match(self, wanted: Int32Array, num_after: int) -> Match:
        """Return the longest end of `wanted` that occurs here with at least one token after it.

        Of equally long ones the latest, but one that `num_after` tokens follow precedes those with fewer.
        """
        tokens = self._tokens[: self._length]
        ends = np.flatnonzero(tokens[:-1] == wanted[-1]) + 1 if len(wanted) else np.zeros(0, dtype=np.intp)
        length, longest = 0, ends
        while len(ends):
            length, longest = length + 1, ends
            if length == len(wanted):
                break
            ends = ends[ends > length]
            ends = ends[tokens[ends - length - 1] == wanted[-length - 1]]
        if not length:
            return Match(0, 0)
        followed = longest[longest + num_after <= self._length]
        return Match(length, int((followed if len(followed) else longest)[-1]))
