"""Select the best continuations of each beam search from the logits of one step, on the device.

The beams of a request are adjacent rows of the batch. A score is the sum of log-probabilities in float32, as in
`transformers`. The candidates of a request are ordered best first.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from engine_worker.execution.sampling.sampled_sequence import SampledSequence
from engine_worker.execution.sampling.sampling_pieces import ROWS_AT_ONCE
from engine_worker.scheduling.batch import BeamCandidate


@dataclass(frozen=True, slots=True)
class _Searches:
    """Searches with the same number of beams and of candidates."""

    request_ids: list[str]
    scores: Tensor  # [R, K] float32 on the host, valid after the device has copied it
    beams: Tensor  # [R, K]
    token_ids: Tensor  # [R, K]


class DeviceCandidates:
    """Candidates that may not be computed yet. The step's tokens are copied after them, so collect those first."""

    def __init__(self, searches: list[_Searches]) -> None:
        self._searches = searches

    def collect(self) -> dict[str, list[BeamCandidate]]:
        """Return the candidates by request id, best first. A beam whose logits are not finite has none."""
        candidates = {}
        for searches in self._searches:
            rows = zip(searches.beams.tolist(), searches.token_ids.tolist(), searches.scores.tolist(), strict=True)
            for request_id, (beams, token_ids, scores) in zip(searches.request_ids, rows, strict=True):
                candidates[request_id] = [
                    BeamCandidate(beam, token_id, score)
                    for beam, token_id, score in zip(beams, token_ids, scores, strict=True)
                    if math.isfinite(score)
                ]
        return candidates


def launch_beam_candidates(logits: Tensor, sequences: Sequence[SampledSequence]) -> DeviceCandidates:
    """Enqueue the selection and the copies to the host, without a wait for the device.

    Args:
        logits: [N, V], in the order of `sequences`. Not modified.
        sequences: The sampled sequences of the step; those without beam search are skipped.
    """
    by_shape: dict[tuple[int, int], list[list[int]]] = defaultdict(list)
    beam_rows = [row for row, sequence in enumerate(sequences) if sequence.sampling.use_beam_search]
    for _, group in groupby(beam_rows, key=lambda row: sequences[row].request_id):
        rows = list(group)
        by_shape[len(rows), sequences[rows[0]].num_beam_candidates].append(rows)
    searches = []
    for (num_beams, num_candidates), searching in by_shape.items():
        at_once = max(1, ROWS_AT_ONCE // num_beams)  # bounds the copies of logits
        for first in range(0, len(searching), at_once):
            searches.append(_launch(logits, searching[first : first + at_once], num_candidates, sequences))
    return DeviceCandidates(searches)


def _launch(
    logits: Tensor, rows: list[list[int]], num_candidates: int, sequences: Sequence[SampledSequence]
) -> _Searches:
    """Launch R searches of B beams each. `rows`: [R][B], rows of `logits`."""
    num_searches, num_beams, vocab_size = len(rows), len(rows[0]), logits.shape[1]
    index = torch.tensor(rows).flatten()
    so_far = torch.tensor([[sequences[row].beam_score for row in beams] for beams in rows], dtype=torch.float32)
    log_probs = logits[index.to(logits.device, non_blocking=True)].float().log_softmax(dim=-1)
    log_probs = log_probs.view(num_searches, num_beams, vocab_size)
    log_probs += so_far.to(logits.device, non_blocking=True)[:, :, None]
    scores, places = log_probs.view(num_searches, -1).topk(num_candidates, dim=-1)
    return _Searches(
        request_ids=[sequences[beams[0]].request_id for beams in rows],
        scores=scores.to("cpu", non_blocking=True),
        beams=(places // vocab_size).to("cpu", non_blocking=True),
        token_ids=(places % vocab_size).to("cpu", non_blocking=True),
    )
