"""Propose what a draft head of the model made at the end of the last step (execution/step/draft_steps.py)."""

from collections.abc import Iterable
from dataclasses import dataclass

from engine_worker.kv.sequence import Sequence
from engine_worker.scheduling.speculation.config import SpeculativeConfig


@dataclass(frozen=True, slots=True)
class _Made:
    num_known_tokens: int  # the drafts follow these
    token_ids: list[int]


class HeadProposer:
    def __init__(self, config: SpeculativeConfig) -> None:
        self.num_made = config.num_speculative_tokens
        self._made: dict[Sequence, _Made] = {}

    def received(self, sequence: Sequence, drafts: list[int]) -> None:
        self._made[sequence] = _Made(sequence.num_known_tokens, drafts)

    def propose(self, sequence: Sequence, max_drafts: int) -> list[int]:
        made = self._made.pop(sequence, None)
        if made is None or made.num_known_tokens != sequence.num_known_tokens:
            return []
        return made.token_ids[:max_drafts]

    def ended(self, sequences: Iterable[Sequence]) -> None:
        for sequence in sequences:
            self._made.pop(sequence, None)
