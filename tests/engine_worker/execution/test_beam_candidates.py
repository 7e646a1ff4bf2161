"""Beam candidates for searches of several shapes in one batch, compared with a plain sort."""

import math

import torch

from engine_worker.execution.sampling.beam_candidates import launch_beam_candidates
from engine_worker.kv.sequence import Sequence
from tests.builders import make_sequence

VOCAB_SIZE = 50


def beams(request_id: str, width: int, scores: list[float]) -> list[Sequence]:
    made = [make_sequence(3, request_id, use_beam_search=True, beam_width=width, eos_token_ids=(1, 2)) for _ in scores]
    for beam, score in zip(made, scores, strict=True):
        beam.beam_score = score
    return made


def test_beam_candidates_mixed_batch_equal_sorted_scores() -> None:
    sequences = [
        make_sequence(3, "sampled"),
        *beams("a", 2, [-1.0, -1.25]),
        *beams("b", 3, [0.0]),
        *beams("c", 2, [-9.0, -0.5]),
        make_sequence(3, "sampled too"),
    ]
    logits = torch.randn(len(sequences), VOCAB_SIZE, generator=torch.Generator().manual_seed(1))
    found = launch_beam_candidates(logits, sequences).collect()
    assert found.keys() == {"a", "b", "c"}
    log_probs = logits.log_softmax(dim=-1)
    for request_id, rows in {"a": [1, 2], "b": [3], "c": [4, 5]}.items():
        num_candidates = 3 * sequences[rows[0]].sampling.beam_width  # two stop tokens
        expected = sorted(
            (
                (-(log_probs[row, token_id] + sequences[row].beam_score).item(), place, token_id)
                for place, row in enumerate(rows)
                for token_id in range(VOCAB_SIZE)
            )
        )[:num_candidates]
        got = [(-candidate.score, candidate.beam, candidate.token_id) for candidate in found[request_id]]
        assert got == expected


def test_beam_candidates_batch_without_search_are_empty() -> None:
    assert launch_beam_candidates(torch.zeros(1, VOCAB_SIZE), [make_sequence(3)]).collect() == {}


def test_beam_candidates_nan_logits_are_empty() -> None:
    logits = torch.full((1, VOCAB_SIZE), math.nan)
    assert launch_beam_candidates(logits, beams("a", 2, [0.0])).collect() == {"a": []}
