"""Rows of the sampler for sequences with drafts: one for each draft that may be right, and one for the token before.

    rows, indices = sampled_rows(batch.sequences)    before sampling
    kept = kept_rows(batch.sequences, token_ids)     after it: a row stands if all drafts before it were drawn
    forced_drafts(batch, sampled, ...)               what grammars allow only: drafts of the next step

A row samples as if its drafts were output already, so penalties, bad words, min_tokens and log-probabilities are those
of a step without drafts. Nothing is rejected by chance: a draft is right if the seeded draw is the same token.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeAlias

from engine_worker.execution.sampling.sampled_sequence import SampledSequence
from engine_worker.scheduling.batch import ScheduledBatch, ScheduledSequence, Sequence
from shared.messages import Pooling, SamplingParams

# Of a sequence, the output index of its sampled tokens, and these: the tokens that must follow.
ForcedTokens: TypeAlias = Callable[[SampledSequence, int, list[int]], list[int]]


@dataclass(frozen=True, slots=True, eq=False)
class DraftRow:
    """A SampledSequence: `sequence` with some drafts as output."""

    sequence: SampledSequence
    drafts: tuple[int, ...]

    @property
    def request_id(self) -> str:
        return self.sequence.request_id

    @property
    def sampling(self) -> SamplingParams:
        return self.sequence.sampling

    @property
    def pooling(self) -> Pooling | None:
        return self.sequence.pooling

    @property
    def prompt_token_ids(self) -> list[int]:
        return self.sequence.prompt_token_ids

    @property
    def output_token_ids(self) -> list[int]:
        return [*self.sequence.output_token_ids, *self.drafts]

    @property
    def num_output_tokens(self) -> int:
        return self.sequence.num_output_tokens + len(self.drafts)

    @property
    def stop_token_ids(self) -> frozenset[int]:
        return self.sequence.stop_token_ids

    @property
    def beam_score(self) -> float:
        return self.sequence.beam_score

    @property
    def num_beam_candidates(self) -> int:
        return self.sequence.num_beam_candidates


def sampled_rows(batch: Iterable[ScheduledSequence]) -> tuple[list[SampledSequence], list[int]]:
    """Return the sampler's rows of a step, and the output index of each row's token."""
    rows: list[SampledSequence] = []
    indices: list[int] = []
    for scheduled in batch:
        if scheduled.samples:
            index = scheduled.output_index
            rows.append(scheduled.sequence)
            indices.append(index)
            for number in range(1, len(scheduled.drafts) + 1):
                rows.append(DraftRow(scheduled.sequence, scheduled.drafts[:number]))
                indices.append(index + number)
    return rows, indices


def kept_rows(batch: Iterable[ScheduledSequence], token_ids: list[int | None]) -> list[slice | None]:
    """Return the rows of each sequence whose tokens stand; None if it did not sample.

    Args:
        batch: The sequences of the step.
        token_ids: One per row; None if the row failed.
    """
    kept: list[slice | None] = []
    first = 0
    for scheduled in batch:
        if not scheduled.samples:
            kept.append(None)
            continue
        end = first + 1
        for draft in scheduled.drafts:
            if token_ids[end - 1] != draft:
                break
            end += 1
        kept.append(slice(first, end))
        first += 1 + len(scheduled.drafts)
    return kept


def forced_drafts(
    batch: ScheduledBatch, sampled: Iterable[list[int] | None], forced_tokens: ForcedTokens
) -> dict[Sequence, list[int]]:
    """Return the drafts of sequences whose grammars force what follows the sampled tokens."""
    most = batch.num_drafts_to_make
    if not most:
        return {}
    forced = {
        scheduled.sequence: forced_tokens(scheduled.sequence, scheduled.output_index, token_ids)[:most]
        for scheduled, token_ids in zip(batch.sequences, sampled, strict=True)
        if token_ids
    }
    return {sequence: token_ids for sequence, token_ids in forced.items() if token_ids}
