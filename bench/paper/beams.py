"""Beam search continuations without a model: log-probabilities drawn from those of a real model.

A row has the log-probabilities of a language model's most likely tokens at one position (record_next_tokens.py). Every
beam draws a row per step, so beams share parents as often as under a model with the same certainty.
"""

import json
from collections import defaultdict
from functools import cache
from pathlib import Path
from random import Random

from engine_worker.kv.sequence import BeamCandidate, Sequence
from engine_worker.scheduling.batch import ScheduledBatch

RECORDED = Path(__file__).with_name("next_token_logprobs.json")


def beam_candidates(batch: ScheduledBatch) -> dict[str, list[BeamCandidate]]:
    """Return the best candidates for each beam search that samples in this step, by request id."""
    groups: defaultdict[str, list[Sequence]] = defaultdict(list)
    for scheduled in batch.sequences:
        if scheduled.samples and scheduled.sequence.sampling.use_beam_search:
            groups[scheduled.sequence.request_id].append(scheduled.sequence)
    return {request_id: _candidates(request_id, beams) for request_id, beams in groups.items()}


def _candidates(request_id: str, beams: list[Sequence]) -> list[BeamCandidate]:
    random = Random(f"{request_id}/{beams[0].num_output_tokens}")
    candidates = [
        BeamCandidate(place, token_id, beam.beam_score + logprob)
        for place, beam in enumerate(beams)
        for token_id, logprob in enumerate(random.choice(_rows()))
    ]
    candidates.sort(key=lambda candidate: -candidate.score)
    return candidates[: beams[0].num_beam_candidates]


@cache
def _rows() -> list[list[float]]:
    rows: list[list[float]] = json.loads(RECORDED.read_text(encoding="utf-8"))["rows"]
    return rows
