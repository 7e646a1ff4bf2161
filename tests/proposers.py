"""Proposers for tests: one that knows the fake model, with or without mistakes, and one that guesses at random."""

from collections.abc import Callable, Iterable
from random import Random

from engine_worker.kv.sequence import Sequence
from engine_worker.scheduling.speculation.config import SpeculativeConfig
from engine_worker.scheduling.speculation.draft_gain import DraftGain
from engine_worker.scheduling.speculation.proposers.executor import ExecutorProposer
from tests.builders import VOCAB_SIZE, next_token


class OracleProposer:
    """Proposes the fake model's own tokens. `error_ratio`: the share of drafts that are replaced by random tokens."""

    def __init__(self, error_ratio: float = 0.0, window: int = 0, seed: int = 0) -> None:
        self.kept: set[Sequence] = set()  # sequences that have not ended
        self._error_ratio = error_ratio
        self._window = window
        self._random = Random(seed)

    def propose(self, sequence: Sequence, max_drafts: int) -> list[int]:
        self.kept.add(sequence)
        known = sequence.token_ids(0, sequence.num_known_tokens)
        drafts: list[int] = []
        for number in range(self._random.randint(0, max_drafts)):
            seen, index = [*known, *drafts][-self._window :], sequence.num_output_tokens + number
            right = next_token(seen, index, sequence.sampling, sequence.stop_token_ids, VOCAB_SIZE)
            is_wrong = self._random.random() < self._error_ratio
            drafts.append(self._random.randrange(VOCAB_SIZE) if is_wrong else right)
        return drafts

    def ended(self, sequences: Iterable[Sequence]) -> None:
        self.kept.difference_update(sequences)


class FunctionProposer:
    """Proposes what a function returns, cut to the allowed number."""

    def __init__(self, function: Callable[[Sequence], list[int]]) -> None:
        self._function = function

    def propose(self, sequence: Sequence, max_drafts: int) -> list[int]:
        return self._function(sequence)[:max_drafts]

    def ended(self, sequences: Iterable[Sequence]) -> None:
        pass


class FlickeringGain(DraftGain):
    """Says at random whether drafts pay, and how likely they must be right."""

    def __init__(self, seed: int) -> None:
        super().__init__(1.0, runs_ahead=True)
        self._random = Random(seed)

    def is_on(self, num_sequences: int) -> bool:
        return self._random.random() < 0.5

    def needed_chance(self, num_sequences: int) -> float:
        return self._random.random()


class FakeHead(ExecutorProposer):
    """Proposes what the executor made."""

    def __init__(self, num_drafts: int) -> None:
        super().__init__(SpeculativeConfig(method="eagle3", model="head", num_speculative_tokens=num_drafts))
        self.kept: set[Sequence] = set()  # sequences that have not ended

    def received(self, sequence: Sequence, drafts: list[int]) -> None:
        self.kept.add(sequence)
        super().received(sequence, drafts)

    def ended(self, sequences: Iterable[Sequence]) -> None:
        self.kept.difference_update(sequences)
        super().ended(sequences)
