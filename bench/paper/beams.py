"""Continuations for beam search without a model: how likely each is, drawn from what a real model's were.

A row is the log-probabilities of a language model's most likely tokens at one position (record_next_tokens.py). Every
beam draws a row at every step, so beams have common parents as often as under a model that is as sure of its tokens.
"""

import json
from collections import defaultdict
from functools import cache
from pathlib import Path
from random import Random

from engine_worker.scheduling.batch import ScheduledBatch
from engine_worker.scheduling.sequence import BeamCandidate, Sequence

RECORDED = Path(__file__).with_name("next_token_logprobs.json")


def beam_candidates(batch: ScheduledBatch) -> dict[str, list[BeamCandidate]]:
    """For each beam search that samples in this step, by request id: as many as it asks for, best first."""
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
