"""Drafts that came with a step's result, and hold while they follow the known tokens."""

from collections.abc import Iterable

from engine_worker.kv.sequence import Sequence


class GivenDrafts:
    def __init__(self) -> None:
        self._given: dict[Sequence, tuple[int, list[int]]] = {}  # the number of tokens before them, and their ids

    def keep(self, sequence: Sequence, token_ids: list[int]) -> None:
        self._given[sequence] = sequence.num_known_tokens, token_ids

    def take(self, sequence: Sequence, most: int) -> list[int]:
        """Return at most so many drafts of a sequence; none if it went on in another way."""
        num_known_tokens, token_ids = self._given.pop(sequence, (0, []))
        return token_ids[:most] if num_known_tokens == sequence.num_known_tokens else []

    def forget(self, sequences: Iterable[Sequence]) -> None:
        for sequence in sequences:
            self._given.pop(sequence, None)
