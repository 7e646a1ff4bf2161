"""The chance that the next draft of a sequence is right, from its last drafts.

A sequence whose drafts are wrong gets fewer, down to none. Its chance then rises with each token, so it is tried again.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from engine_worker.kv.sequence import Sequence

_FIRST = 0.8  # before any draft was checked
_WEIGHT = 0.2  # of a checked draft
_RECOVERY = 0.02  # of the distance to 1, per token: a chance of 0.5 is 0.8 after 45


@dataclass(slots=True)
class _Chance:
    value: float
    num_output_tokens: int  # of the sequence when its last drafts were checked


class DraftChances:
    def __init__(self) -> None:
        self._by_sequence: dict[Sequence, _Chance] = {}

    def of(self, sequence: Sequence) -> float:
        """Return the chance that the next draft is right, if those before it are."""
        last = self._by_sequence.get(sequence)
        if last is None:
            return _FIRST
        return 1 - (1 - last.value) * (1 - _RECOVERY) ** (sequence.num_output_tokens - last.num_output_tokens)

    def num_worth(self, sequence: Sequence, needed_chance: float) -> float:
        """Return how many drafts have at least `needed_chance`: the second is right only if the first is, and so on."""
        chance = self.of(sequence)
        if needed_chance <= 0.0 or chance >= 1.0:
            return math.inf
        return math.log(needed_chance) // math.log(chance)

    def verified(self, sequence: Sequence, num_drafts: int, num_accepted: int) -> None:
        """Learn from a verification: the first `num_accepted` drafts were right, and the next one, if any, was wrong.

        Call it before their tokens are appended.
        """
        chance = 1 - (1 - self.of(sequence)) * (1 - _WEIGHT) ** num_accepted
        if num_accepted < num_drafts:
            chance *= 1 - _WEIGHT
        self._by_sequence[sequence] = _Chance(chance, sequence.num_output_tokens + num_accepted)

    def ended(self, sequences: Iterable[Sequence]) -> None:
        for sequence in sequences:
            self._by_sequence.pop(sequence, None)
