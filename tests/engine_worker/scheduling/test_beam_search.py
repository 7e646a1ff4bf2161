"""Beam search over a table of probabilities. ../execution compares it with transformers."""

import math
from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from engine_worker.kv.sequence import BeamCandidate, Sequence
from engine_worker.scheduling.beam_search import BeamSearch, Hypothesis
from shared.messages import FinishReason
from tests.builders import make_sampling

STOP_TOKEN = 0
LogProbs = Callable[[list[int]], list[float]]


def search(log_probs: LogProbs, *, stop_token_ids: frozenset[int] = frozenset({STOP_TOKEN}), **sampling: Any) -> Any:
    """Run a search to its end and return (answers, number of steps)."""
    params = make_sampling(use_beam_search=True, **{"n": sampling["beam_width"], **sampling})
    beam_search = BeamSearch(params, stop_token_ids, params.max_tokens)
    num_candidates = Sequence("a", [1], params, stop_token_ids).num_beam_candidates
    beams: list[tuple[list[int], float]] = [([], 0.0)]
    num_steps = 0
    while beams:
        candidates = [
            BeamCandidate(place, token_id, score + log_prob)
            for place, (output, score) in enumerate(beams)
            for token_id, log_prob in enumerate(log_probs(output))
        ]
        candidates.sort(key=lambda candidate: -candidate.score)
        moves = beam_search.advance([output for output, _ in beams], candidates[:num_candidates])
        beams = [([*beams[move.beam][0], move.token_id], move.score) for move in moves]
        assert len(beams) in (0, params.beam_width)
        num_steps += 1
    return beam_search.best(), num_steps


def random_model(seed: int, vocab_size: int = 6) -> LogProbs:
    def log_probs(output: list[int]) -> list[float]:
        weights = [Random(f"{seed}{output}{token_id}").random() for token_id in range(vocab_size)]
        return [math.log(weight / sum(weights)) for weight in weights]

    return log_probs


def test_beam_search_wide_beam_finds_most_likely_texts() -> None:
    """At most 25 prefixes of two tokens are open, so a width of 30 prunes nothing. It needs 60 candidates per step."""
    log_probs = random_model(1)

    def everything(output: list[int], score: float) -> list[tuple[float, list[int]]]:
        if output and (output[-1] == STOP_TOKEN or len(output) == 3):
            return [(score, output)]
        pairs = enumerate(log_probs(output))
        return [text for token_id, log_prob in pairs for text in everything([*output, token_id], score + log_prob)]

    best = sorted(everything([], 0.0), reverse=True)[:4]
    answers, _ = search(padded(log_probs), beam_width=30, n=4, max_tokens=3, length_penalty=0.0, early_stopping="never")
    assert [(answer.score, answer.token_ids) for answer in answers] == [
        (pytest.approx(score), output) for score, output in best
    ]


def padded(log_probs: LogProbs, vocab_size: int = 64) -> LogProbs:
    return lambda output: [*log_probs(output), *[-1e6] * (vocab_size - 6)]


def chain(*rows: list[float]) -> LogProbs:
    """Return a model whose probabilities depend only on the length; token 0 stops."""
    return lambda output: [math.log(probability) for probability in rows[len(output)]]


def test_beam_search_stop_outside_best_width_is_ignored() -> None:
    """With width 1 the stop token ranks second, so it is not taken, although 0.45 exceeds all later results."""
    model = chain([0.45, 0.55], [0.4, 0.6], [0.4, 0.6])
    answers, num_steps = search(model, beam_width=1, max_tokens=3, length_penalty=0.0)
    likelihood: Any = pytest.approx(math.log(0.55 * 0.6 * 0.6))
    assert answers == [Hypothesis(likelihood, [1, 1, 1], FinishReason.LENGTH)]
    assert num_steps == 3


@pytest.mark.parametrize(("length_penalty", "tokens"), [(0.0, [0]), (1.0, [1, 1, 1])])
def test_length_penalty_selects_short_or_long_text(length_penalty: float, tokens: list[int]) -> None:
    """The short text has p = 0.45, the long 0.55 * 0.9 * 0.8 = 0.396: short wins by sum, long by mean."""
    model = chain([0.45, 0.55, 1e-9], [0.1, 0.9, 1e-9], [0.2, 0.8, 1e-9])
    answers, _ = search(model, beam_width=2, n=1, max_tokens=3, length_penalty=length_penalty, early_stopping="never")
    assert answers[0].token_ids == tokens


@pytest.mark.parametrize(
    ("stop_at_second", "early_stopping", "length_penalty", "num_steps"),
    [
        # Two texts have ended after two steps: [0] with 0.5, and [1, 0].
        (0.3, True, 1.0, 2),
        (0.3, False, 1.0, 6),  # [1, 1, ...] has the better mean in every step
        (0.3, "never", 0.0, 4),  # 0.5 * 0.65 ** 3 is the first sum below the 0.15 of [1, 0]
        (0.5, False, 1.0, 2),  # the mean of log 0.225 over two tokens is below that of log 0.25 for [1, 0]
        (0.5, "never", 1.0, 6),  # over six tokens the mean would exceed it
    ],
)
def test_beam_search_early_stopping_sets_number_of_steps(
    stop_at_second: float, early_stopping: Any, length_penalty: float, num_steps: int
) -> None:
    second = [stop_at_second, 0.95 - stop_at_second, 0.05]
    model = chain([0.5, 0.5, 1e-9], second, *[[0.3, 0.65, 0.05]] * 4)
    _, steps = search(model, beam_width=2, max_tokens=6, early_stopping=early_stopping, length_penalty=length_penalty)
    assert steps == num_steps


def test_beam_search_without_stop_tokens_has_full_length() -> None:
    answers, num_steps = search(random_model(3), stop_token_ids=frozenset(), beam_width=3, n=2, max_tokens=5)
    assert [(len(answer.token_ids), answer.reason) for answer in answers] == [(5, FinishReason.LENGTH)] * 2
    assert answers[0].score >= answers[1].score and num_steps == 5


def test_beam_search_several_stop_tokens_add_candidates() -> None:
    stops = frozenset({0, 1, 2})
    sampling = make_sampling(use_beam_search=True, beam_width=2, n=2)
    assert Sequence("a", [1], sampling, stops).num_beam_candidates == 8
    assert Sequence("a", [1], sampling).num_beam_candidates == 4
    answers, _ = search(random_model(4, vocab_size=8), stop_token_ids=stops, beam_width=2, max_tokens=8)
    assert all(set(answer.token_ids[:-1]).isdisjoint(stops) for answer in answers)
