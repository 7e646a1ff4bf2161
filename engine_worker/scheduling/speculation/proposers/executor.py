"""Propose what the executor made at the end of the last step: by a draft head of the model, or by a search on the GPU.

See execution/step/draft_maker.py.
"""

from collections.abc import Iterable

from engine_worker.kv.sequence import Sequence
from engine_worker.scheduling.speculation.config import SpeculativeConfig
from engine_worker.scheduling.speculation.given_drafts import GivenDrafts


class ExecutorProposer:
    def __init__(self, config: SpeculativeConfig) -> None:
        self.num_made, self.lookahead = config.num_speculative_tokens, config.lookahead
        self._made = GivenDrafts()

    def received(self, sequence: Sequence, drafts: list[int]) -> None:
        self._made.keep(sequence, drafts)

    def propose(self, sequence: Sequence, max_drafts: int) -> list[int]:
        return self._made.take(sequence, max_drafts)

    def ended(self, sequences: Iterable[Sequence]) -> None:
        self._made.forget(sequences)
