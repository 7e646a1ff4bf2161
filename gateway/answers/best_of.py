"""The likeliest of several samples: held back until all of them have ended, then answered best first. Pure.

A sample's rank is the sum of its tokens' log-probabilities by the model itself, before temperature and penalties (as
vLLM's cumulative_logprob). Knows nothing of events or JSON.
"""

from collections.abc import Iterable, Sequence

from gateway.answers.choice_progress import ChoiceUpdate


class BestOf:
    def __init__(self, first_choice: int, num_choices: int, *, show_logprobs: bool) -> None:
        """`first_choice`: index of the best one in the answer."""
        self._first_choice = first_choice
        self._num_choices = num_choices
        self._show_logprobs = show_logprobs
        self._held: dict[int, list[ChoiceUpdate]] = {}  # by index of the sample, counted from first_choice too

    def hold(self, updates: Iterable[ChoiceUpdate]) -> None:
        for update in updates:
            self._held.setdefault(update.index - self._first_choice, []).append(update)

    def answers(self, cumulative_logprobs: Sequence[float]) -> list[ChoiceUpdate]:
        """One update a choice; `cumulative_logprobs[i]` is that of sample i. Of equal ones the first is better."""
        ranked = sorted(self._held, key=lambda sample: -cumulative_logprobs[sample])
        return [self._answer(rank, self._held[sample]) for rank, sample in enumerate(ranked[: self._num_choices])]

    def _answer(self, rank: int, updates: Sequence[ChoiceUpdate]) -> ChoiceUpdate:
        entries = tuple(entry for update in updates for entry in update.logprobs) if self._show_logprobs else ()
        text = "".join(update.text for update in updates)
        token_ids = tuple(token_id for update in updates for token_id in update.token_ids)
        last = updates[-1]
        index = self._first_choice + rank
        return ChoiceUpdate(index, text, last.reason, entries, token_ids, stop_string=last.stop_string)
