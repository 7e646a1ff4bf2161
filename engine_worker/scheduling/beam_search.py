"""Beam search of one request: candidates of a step in, the beams that go on out, the best texts at the end. Pure.

Keeps the `beam_width` most likely continuations and, apart from them, the best that have ended. The rules are those of
`transformers`' beam search (5.x), token for token:

    candidates   the best max(2, 1 + stop tokens) * width continuations of all beams, so that width of them go on even
                 if each beam's best are stop tokens
    ended        a candidate that stops (stop token or last length) counts only if it is among the `width` best; its
                 score is the sum of log-probabilities / length ** length_penalty
    end          when no running beam can beat the worst of `width` ended ones. `early_stopping` True: as soon as there
                 are `width`; False: judged by the best beam at its length now; "never": at the greatest length if
                 length_penalty favours long texts

Knows nothing of blocks or sequences: a beam is its place in the list. It is used where a token's way back is applied,
for requests with beams.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from engine_worker.scheduling.sequence import BeamCandidate
from shared.messages import FinishReason, SamplingParams


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A text that has ended; the stop token, if there is one, is its last."""

    score: float
    token_ids: list[int]
    reason: FinishReason


class BeamSearch:
    def __init__(self, sampling: SamplingParams, stop_token_ids: frozenset[int], max_output_tokens: int) -> None:
        self._width = sampling.beam_width
        self._num_answers = sampling.n
        self._length_penalty = sampling.length_penalty
        self._early_stopping = sampling.early_stopping
        self._stop_token_ids = stop_token_ids
        self._max_output_tokens = max_output_tokens
        self._ended: list[Hypothesis] = []  # best first, at most `width`

    def advance(self, outputs: Sequence[Sequence[int]], candidates: Sequence[BeamCandidate]) -> list[BeamCandidate]:
        """The beams of the next step, best first; none when the search is over.

        `outputs`: output tokens of each beam, all of one length. `candidates`: num_beam_candidates, best first.
        """
        length = len(outputs[0]) + 1
        self._end_some(outputs, candidates[: self._width], length)
        if length >= self._max_output_tokens:
            return []
        running = [candidate for candidate in candidates if candidate.token_id not in self._stop_token_ids]
        return running[: self._width] if running and self._can_improve(running[0].score, length) else []

    def best(self) -> list[Hypothesis]:
        """The answers, best first; to be asked when the search is over."""
        return self._ended[: self._num_answers]

    def _end_some(self, outputs: Sequence[Sequence[int]], best: Sequence[BeamCandidate], length: int) -> None:
        for candidate in best:
            if candidate.token_id in self._stop_token_ids:
                reason = FinishReason.STOP
            elif length >= self._max_output_tokens:
                reason = FinishReason.LENGTH
            else:
                continue
            token_ids = [*outputs[candidate.beam], candidate.token_id]
            self._ended.append(Hypothesis(self._normalised(candidate.score, length), token_ids, reason))
        self._ended.sort(key=lambda hypothesis: -hypothesis.score)  # stable: the earlier one wins a tie
        del self._ended[self._width :]

    def _can_improve(self, best_running_score: float, length: int) -> bool:
        if len(self._ended) < self._width:
            return True
        if self._early_stopping is True:
            return False
        if self._early_stopping == "never" and self._length_penalty > 0.0:
            length = self._max_output_tokens
        return self._normalised(best_running_score, length) > self._ended[-1].score

    def _normalised(self, score: float, length: int) -> float:
        normalised: float = score / length**self._length_penalty
        return normalised
