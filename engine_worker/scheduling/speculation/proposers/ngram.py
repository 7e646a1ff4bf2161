"""Continue as the text did before: find the last tokens earlier in the sequence, and propose what followed them.

Known as prompt lookup. It pays where the output repeats the prompt: edits of code, summaries, quotes. A short match
often ends soon, so it gets only as many drafts as it has tokens.
"""

from collections.abc import Iterable

from engine_worker.kv.sequence import Sequence
from engine_worker.scheduling.speculation.config import SpeculativeConfig
from engine_worker.scheduling.speculation.token_history import TokenHistory


class NgramProposer:
    def __init__(self, config: SpeculativeConfig) -> None:
        self._min, self._max = config.prompt_lookup_min, config.prompt_lookup_max
        self._histories: dict[Sequence, TokenHistory] = {}

    def propose(self, sequence: Sequence, max_drafts: int) -> list[int]:
        history = self._histories.setdefault(sequence, TokenHistory())
        history.follow(sequence)
        match = history.longest_match(history.last(self._max), max_drafts)
        if match.length < self._min:
            return []
        return history.after(match.end, max_drafts if match.length == self._max else min(max_drafts, match.length))

    def ended(self, sequences: Iterable[Sequence]) -> None:
        for sequence in sequences:
            self._histories.pop(sequence, None)
