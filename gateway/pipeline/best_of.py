"""best_of: the likeliest of several samples, held until all have ended, best first. Pure.

A sample's rank is the sum of its tokens' log-probabilities before temperature and penalties (vLLM's
cumulative_logprob).
"""

from collections.abc import Iterator, Sequence

from msgspec import structs

from gateway.pipeline.choice_writer import ChoiceDelta, Write


class BestOf:
    def __init__(self, first_choice: int, num_choices: int, *, show_logprobs: bool) -> None:
        """`first_choice`: index of the best one in the answer."""
        self.outputs: Sequence[Write] = ()  # by rank
        self._first_choice = first_choice
        self._num_choices = num_choices
        self._show_logprobs = show_logprobs
        self._held: dict[int, list[ChoiceDelta]] = {}  # by index of the sample, counted from first_choice too

    def hold(self, delta: ChoiceDelta, out: bytearray) -> None:
        """Keep a delta of a sample."""
        self._held.setdefault(delta.index - self._first_choice, []).append(delta)

    def write(self, delta: ChoiceDelta, out: bytearray) -> None:
        """Pass on a delta of ranked()."""
        self.outputs[delta.index - self._first_choice](delta, out)

    def ranked(self, cumulative_logprobs: Sequence[float]) -> Iterator[ChoiceDelta]:
        """Yield the choices, best first; the earlier of equal ones first.

        A choice is one delta. With log-probabilities, which take 40 us per token to write, the deltas stay separate.

        Args:
            cumulative_logprobs: By sample.
        """
        ranked = sorted(self._held, key=lambda sample: -cumulative_logprobs[sample])
        for rank, sample in enumerate(ranked[: self._num_choices]):
            index, deltas = self._first_choice + rank, self._held[sample]
            if self._show_logprobs:
                yield from (structs.replace(delta, index=index) for delta in deltas)
            else:
                yield _as_one(index, deltas)


def _as_one(index: int, deltas: Sequence[ChoiceDelta]) -> ChoiceDelta:
    """Without log-probabilities."""
    text = "".join(delta.text for delta in deltas)
    token_ids = tuple(token_id for delta in deltas for token_id in delta.token_ids)
    last = deltas[-1]
    return ChoiceDelta(index, text, last.reason, (), token_ids, stop_string=last.stop_string)
