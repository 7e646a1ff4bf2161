from collections import Counter

from engine_worker.execution.token_counts import PenaltyCounts, TokenCounts
from tests.builders import make_sequence


def as_dict(counts: TokenCounts | None) -> dict[int, int]:
    assert counts is not None
    return {int(token_id): int(count) for token_id, count in zip(counts.token_ids, counts.counts, strict=True)}


def test_counts_grow_with_the_output_as_counting_anew_gives_them() -> None:
    sequence = make_sequence([1, 2, 2], repetition_penalty=1.5)
    counts = PenaltyCounts()
    counts.keep_only([sequence])
    for step in range(700):  # beyond what fits at first
        assert as_dict(counts.of(sequence)) == {1: 0, 2: 0, **Counter(sequence.output_token_ids)}
        sequence.output_token_ids.append(1 + step * step % 601)


def test_only_repetition_touches_the_prompt() -> None:
    sequence = make_sequence([1, 2, 2], output_token_ids=[7, 1, 7], presence_penalty=0.5)
    counts = PenaltyCounts()
    counts.keep_only([sequence])
    assert as_dict(counts.of(sequence)) == {7: 2, 1: 1}


def test_a_sequence_that_comes_back_is_counted_again() -> None:
    sequence, other = (make_sequence(3, name, frequency_penalty=1.0) for name in "ab")
    counts = PenaltyCounts()
    counts.keep_only([sequence, other])
    sequence.output_token_ids.append(5)
    assert as_dict(counts.of(sequence)) == {5: 1}
    counts.keep_only([other])
    assert counts.of(sequence) is None
    counts.keep_only([other, sequence])
    assert as_dict(counts.of(sequence)) == {5: 1}


def test_sequences_without_penalties_are_not_counted() -> None:
    sequence = make_sequence(3)
    counts = PenaltyCounts()
    counts.keep_only([sequence])
    assert counts.of(sequence) is None
