"""Token counts of penalized sequences follow their tokens, for drawn and known tokens and for any row."""

from collections import Counter
from typing import Any

import pytest
import torch

from engine_worker.execution.sampling import token_counts
from engine_worker.execution.sampling.token_counts import PenaltyCounts
from engine_worker.kv.sequence import Sequence
from kernels.sampling.token_counts_reference import MAX_COUNT
from tests.builders import make_sequence

VOCAB_SIZE = 50
CPU = torch.device("cpu")


def counts_of(counts: PenaltyCounts, number: int = 0) -> list[tuple[Counter[int], set[int]]]:
    """Return the output counts and prompt tokens of each row of a piece."""
    rows = counts.pieces[number]
    found = rows.counts[rows.count_rows].int()
    return [
        (
            Counter({token_id: count & MAX_COUNT for token_id, count in enumerate(row) if count & MAX_COUNT}),
            {token_id for token_id, count in enumerate(row) if count < 0},
        )
        for row in found.tolist()
    ]


def penalized(request_id: str, prompt: list[int], output: list[int], **sampling: Any) -> Sequence:
    return make_sequence(prompt, request_id, output_token_ids=output, **{"repetition_penalty": 1.5, **sampling})


def draw(counts: PenaltyCounts, token_id: int, num_rows: int) -> None:
    for rows in counts.pieces.values():
        rows.count(torch.full((num_rows,), token_id))


def test_counts_drawn_token_is_counted_before_host_knows_it() -> None:
    sequence = penalized("a", [1, 2, 2], [7])
    counts = PenaltyCounts(VOCAB_SIZE, 1, CPU)
    counts.follow([make_sequence(3), sequence])
    counts.prepare([0, 1])
    draw(counts, 9, 2)
    counts.prepare([1, 2])
    assert counts_of(counts) == [(Counter({7: 1, 9: 1}), {1, 2})]


def test_counts_prompt_only_with_repetition_penalty() -> None:
    sequences = [penalized("a", [1, 2], [1, 7, 7], repetition_penalty=1.0, presence_penalty=0.5)]
    counts = PenaltyCounts(VOCAB_SIZE, 1, CPU)
    counts.follow(sequences)
    counts.prepare([3])
    assert counts_of(counts) == [(Counter({1: 1, 7: 2}), set())]


def test_counts_returning_sequence_is_counted_again() -> None:
    """As after a preemption: another sequence used its row meanwhile."""
    first, second = penalized("a", [3], [4, 4]), penalized("b", [5], [6])
    counts = PenaltyCounts(VOCAB_SIZE, 1, CPU)
    for sequence in (first, second, first):
        counts.follow([sequence])
        counts.prepare([sequence.num_output_tokens])
    assert counts_of(counts) == [(Counter({4: 2}), {3})]


def test_counts_rows_are_stable_while_batch_changes() -> None:
    sequences = [penalized(str(number), [number], [40 + number]) for number in range(6)]
    counts = PenaltyCounts(VOCAB_SIZE, 4, CPU)
    for batch in ([0, 1, 2, 3], [1, 3], [3, 4, 1, 5], [2, 0, 1]):
        chosen = [sequences[number] for number in batch]
        counts.follow(chosen)
        counts.prepare([sequence.num_output_tokens for sequence in chosen])
        assert counts_of(counts) == [(Counter(one.output_token_ids), set(one.prompt_token_ids)) for one in chosen]
        draw(counts, 39, len(chosen))
        for sequence in chosen:
            sequence.output_token_ids.append(39)


def test_counts_parallel_samples_send_prompt_once(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []
    monkeypatch.setattr(token_counts, "recount", lambda counts, rows, token_ids, spans: sent.append(len(token_ids)))
    prompt = list(range(30))
    counts = PenaltyCounts(VOCAB_SIZE, 4, CPU)
    counts.follow([penalized("a", prompt, [number]) for number in range(4)])
    counts.prepare([1] * 4)
    assert sent == [30 + 4]


def test_counts_many_tokens_are_sent_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_counts, "_TOKENS_AT_ONCE", 5)
    sequences = [penalized(str(number), [number] * 3, [number] * 2) for number in range(3)]
    counts = PenaltyCounts(VOCAB_SIZE, 3, CPU)
    counts.follow(sequences)
    counts.prepare([2] * 3)
    assert counts_of(counts) == [(Counter({number: 2}), {number}) for number in range(3)]
