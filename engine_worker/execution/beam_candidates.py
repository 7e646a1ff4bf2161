"""Logits of one step -> the best continuations of each beam search in it, selected on the device.

All beams of a request stand side by side in the batch. Their scores are sums of log-probabilities in fp32, as those of
`transformers`; the candidates of a request come best first. Knows nothing of which of them go on. It is used in a step,
behind the forward pass, where the sampler draws for all other rows.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from engine_worker.execution.sampled_sequence import SampledSequence
from engine_worker.execution.sampling_pieces import ROWS_AT_ONCE
from engine_worker.scheduling.batch import BeamCandidate


@dataclass(frozen=True, slots=True)
class _Searches:
    """Searches of one shape: beams that run now, and candidates that are wanted."""

    request_ids: list[str]
    scores: Tensor  # [R, K] fp32 on the host, valid once the device has come there
    beams: Tensor  # [R, K]
    token_ids: Tensor  # [R, K]


class DeviceCandidates:
    """Perhaps not computed yet: to be collected after the step's tokens, which are copied behind it."""

    def __init__(self, searches: list[_Searches]) -> None:
        self._searches = searches

    def collect(self) -> dict[str, list[BeamCandidate]]:
        """By request id, best first. A beam whose logits are not finite has no candidate."""
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
    """`logits` [N, V] in the order of `sequences`; not modified. No wait for the device."""
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
    """`rows` [R][B]: the rows of the B beams of R searches."""
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
