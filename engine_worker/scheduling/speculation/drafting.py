"""Chooses the drafts of a step: which sequences get some, how many, and whether drafting pays at all.

    drafts_of(decodes)     when a step is planned: proposals, and blocks for them
    verified()             when it is applied: how many were right
    step_took()            the time of a step, from which draft_gain.py decides
    received()             what the executor made, or a grammar forces, which comes before other proposals

A draft is a token in flight: until its step is applied it counts in num_inflight_tokens. A proposer on the host must
know the last token, so while its drafts are on, no step runs ahead. Drafts of the executor may stay on the device: a
step runs ahead with them unless sampling needs known tokens.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from engine_worker.kv.kv_allocator import KVAllocator
from engine_worker.kv.sequence import Sequence
from engine_worker.scheduling.batch import ScheduledBatch, ScheduledSequence
from engine_worker.scheduling.sequence_group import SequenceGroup
from engine_worker.scheduling.speculation.draft_chances import DraftChances
from engine_worker.scheduling.speculation.draft_gain import DraftGain
from engine_worker.scheduling.speculation.given_drafts import GivenDrafts
from engine_worker.scheduling.speculation.totals import SpeculationTotals


class Proposer(Protocol):
    """Guesses how a sequence goes on. Called for each drafting sequence and step, so it must be fast."""

    def propose(self, sequence: Sequence, max_drafts: int) -> list[int]:
        """Return at most `max_drafts` token ids that may follow the known tokens."""

    def ended(self, sequences: Iterable[Sequence]) -> None:
        """Forget sequences that ended."""


@runtime_checkable
class DeviceProposer(Proposer, Protocol):
    """Proposes drafts that the executor makes at the end of a step."""

    @property
    def num_made(self) -> int:
        """Drafts to make for each sequence."""

    @property
    def lookahead(self) -> int:
        """Tokens after those of a step that making them computes."""

    def received(self, sequence: Sequence, drafts: list[int]) -> None:
        """Keep drafts that follow the known tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftLimits:
    max_drafts: int  # of a sequence and step
    max_samples: int  # of a step: one per decode, and one per draft
    max_tokens: int  # of a step
    may_run_ahead: bool = False  # with drafts of the executor: asynchronous, and no windows, which free blocks

    def of_step(self, num_sampled: int) -> int:
        """Return the most drafts of a step. Half of the tokens beside its decodes stay, so that prompts progress."""
        return min(self.max_samples - num_sampled, (self.max_tokens - num_sampled) // 2)


class Drafting:
    def __init__(self, proposer: Proposer, kv_cache: KVAllocator, limits: DraftLimits, gain: DraftGain) -> None:
        """Prepare to draft. `kv_cache` gives drafts their blocks, and `gain` decides whether drafting pays."""
        self.totals = SpeculationTotals.of(limits.max_drafts)
        self._proposer = proposer
        self._executor = proposer if isinstance(proposer, DeviceProposer) else None
        self._forced = GivenDrafts()
        self._making: set[Sequence] = set()  # the last scheduled step makes drafts for these
        self._kv_cache = kv_cache
        self._limits = limits
        self._gain = gain
        self._chances = DraftChances()

    def is_on(self, num_running: int) -> bool:
        """Whether the next step of `num_running` sequences may draft."""
        return self._gain.is_on(num_running)

    @property
    def max_drafts(self) -> int:
        """The most drafts of a sequence and step."""
        return self._limits.max_drafts

    def runs_ahead(self, running: Iterable[Sequence]) -> bool:
        """Whether steps of these sequences run ahead with drafts that only the device has."""
        return self._executor is not None and self._limits.may_run_ahead and not any(map(_needs_known_tokens, running))

    def num_to_make(self, batch: list[ScheduledSequence], num_running: int) -> int:
        """Return how many drafts the executor makes for each sequence at the end of a step, the last scheduled one."""
        if not self._gain.is_on(num_running):
            self._making = set()
            return 0
        if self._executor is None:
            return self._limits.max_drafts
        self._making = {one.sequence for one in batch if one.samples and one.num_new_tokens}
        return self._executor.num_made

    def received(self, sequence: Sequence, drafts: list[int]) -> None:
        """Keep the drafts that came with a step: those of the executor, or those that a grammar forces."""
        if _may_draft(sequence):
            keep = self._executor.received if self._executor is not None else self._forced.keep
            keep(sequence, drafts)

    def drafts_of(
        self, decodes: list[tuple[SequenceGroup, Sequence]], num_sampled: int
    ) -> Mapping[Sequence, tuple[int, ...]]:
        """Return the drafts of the sequences that get some, which then have the blocks for them.

        `num_sampled`: the most sequences that the step may sample, including those that it begins.
        """
        drafts: dict[Sequence, tuple[int, ...]] = {}
        num_left = self._limits.of_step(num_sampled)
        if num_left <= 0 or not self._gain.is_on(len(decodes)):
            return drafts
        needed_chance = self._gain.needed_chance(len(decodes))
        for group, sequence in decodes:
            most = min(self._limits.max_drafts, num_left, _room_for_drafts(group, sequence))
            proposed = self._proposed(sequence, most, needed_chance) if most > 0 else []
            if proposed and self._take_blocks(sequence, len(proposed)):
                drafts[sequence] = tuple(proposed)
                num_left -= len(proposed)
        return drafts

    def _proposed(self, sequence: Sequence, most: int, needed_chance: float) -> list[int]:
        """Return drafts, -1, -2, ... for those that the step in flight makes."""
        if not sequence.num_inflight_tokens:
            if forced := self._forced.take(sequence, most):
                return forced
            num_worth = min(most, self._chances.num_worth(sequence, needed_chance))
            return self._proposer.propose(sequence, int(num_worth)) if num_worth else []
        if self._executor is None or sequence not in self._making:
            return []
        return [-number for number in range(1, min(most, self._executor.num_made) + 1)]

    def _take_blocks(self, sequence: Sequence, num_drafts: int) -> bool:
        """Count the drafts as tokens in flight, if there are blocks for them without a preemption.

        A head computes further drafts after them, at places that need blocks too.
        """
        num_inflight, num_after = (
            sequence.num_inflight_tokens,
            self._executor.lookahead if self._executor is not None else 0,
        )
        sequence.num_inflight_tokens = num_inflight + num_drafts + num_after
        if self._kv_cache.needs_room(sequence, sequence.num_tokens):
            if not self._kv_cache.can_allocate(sequence):
                sequence.num_inflight_tokens = num_inflight
                return False
            self._kv_cache.allocate(sequence)
        sequence.num_inflight_tokens = num_inflight + num_drafts
        sequence.num_spare_tokens = sequence.num_inflight_tokens + num_after
        return True

    def verified(self, sequence: Sequence, num_drafts: int, num_accepted: int) -> None:
        """Record the outcome of one sequence's drafts, before their tokens are appended."""
        self.totals.add(num_drafts, num_accepted)
        self._chances.verified(sequence, num_drafts, num_accepted)

    def step_took(self, batch: ScheduledBatch, num_tokens: int, seconds: float) -> None:
        """Record a step that gave `num_tokens` tokens, unless it also computed prompts."""
        if all(one.samples and one.num_new_tokens == 1 + len(one.drafts) for one in batch.sequences):
            num_rows = sum(one.num_new_tokens for one in batch.sequences)
            self._gain.record(len(batch.sequences), num_rows, num_tokens, seconds)

    def ended(self, sequences: Iterable[Sequence]) -> None:
        ended = list(sequences)
        self._forced.forget(ended)
        self._chances.ended(ended)
        self._proposer.ended(ended)


def _room_for_drafts(group: SequenceGroup, sequence: Sequence) -> int:
    """Return how many drafts can be kept beside the token that a step gives anyway; 0 if none may be made."""
    sampling, num_inflight = sequence.sampling, sequence.num_inflight_tokens
    if not _may_draft(sequence):
        return 0
    num_output = sequence.num_output_tokens + num_inflight
    return min(sampling.max_tokens - num_output, group.max_num_tokens - sequence.num_tokens) - 1


def _may_draft(sequence: Sequence) -> bool:
    """Whether drafts can be checked.

    A beam search has no next token, and a pooled sequence ends with its first.
    """
    return not (sequence.sampling.use_beam_search or sequence.pooling)


def _needs_known_tokens(sequence: Sequence) -> bool:
    """Whether the rows of drafts can be sampled only if the host knows them: rules and counts depend on them."""
    sampling = sequence.sampling
    rules = sampling.has_penalties or sampling.bad_words or sampling.grammar is not None
    return bool(rules or sampling.min_tokens > sequence.num_output_tokens)
