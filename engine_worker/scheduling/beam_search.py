"""Beam search of one request: selects the beams that continue, and finally the best texts. Pure.

It keeps the `beam_width` most likely continuations and, separately, the best ended ones. The rules are those of
`transformers` 5.x, token for token:

    candidates   the best max(2, 1 + stop tokens) * width continuations of all beams, so that `width` beams continue
                 even if the best tokens of each beam are stop tokens
    ended        a candidate that stops (stop token or maximum length) counts only if it is among the `width` best; its
                 score is the sum of logprobs / length ** length_penalty
    end          no running beam can beat the worst of `width` ended ones. `early_stopping` True: as soon as there are
                 `width`; False: judged by the best beam at its current length; "never": at the maximum length if
                 length_penalty favors long texts

A beam is identified by its position in the list.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from engine_worker.kv.sequence import BeamCandidate
from shared.messages import FinishReason, SamplingParams


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A text that has ended. Its last token is the stop token, if it has one."""

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
        """Return the beams of the next step, best first; none at the end of the search.

        Args:
            outputs: The output tokens of each beam, all of one length.
            candidates: num_beam_candidates continuations, best first.
        """
        length = len(outputs[0]) + 1
        self._end_some(outputs, candidates[: self._width], length)
        if length >= self._max_output_tokens:
            return []
        running = [candidate for candidate in candidates if candidate.token_id not in self._stop_token_ids]
        return running[: self._width] if running and self._can_improve(running[0].score, length) else []

    def best(self) -> list[Hypothesis]:
        """Return the answers, best first. Call it after the end of the search."""
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
            self._ended.append(Hypothesis(self._normalized(candidate.score, length), token_ids, reason))
        self._ended.sort(key=lambda hypothesis: -hypothesis.score)  # stable: the earlier one wins a tie
        del self._ended[self._width :]

    def _can_improve(self, best_running_score: float, length: int) -> bool:
        if len(self._ended) < self._width:
            return True
        if self._early_stopping is True:
            return False
        if self._early_stopping == "never" and self._length_penalty > 0.0:
            length = self._max_output_tokens
        return self._normalized(best_running_score, length) > self._ended[-1].score

    def _normalized(self, score: float, length: int) -> float:
        normalized: float = score / length**self._length_penalty
        return normalized
