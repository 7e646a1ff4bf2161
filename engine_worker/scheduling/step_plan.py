"""The tokens of one step: what the running sequences need, and what is selected.

    collect_demand()   one pass over every running sequence, in every step
    StepPlan           what is added to it counts as computed; a prompt that reaches its end forks

Lists are ordered by age of the group, the oldest first; interactive and background requests are separate. A sequence
whose last token is in flight needs nothing. The scheduler decides order and budget.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from engine_worker.kv.kv_allocator import KVAllocator
from engine_worker.kv.sequence import Sequence, SequenceStatus, ends_with_inflight_token
from engine_worker.scheduling.batch import ScheduledSequence
from engine_worker.scheduling.sequence_group import SequenceGroup

# Prompt logprobs per step. 8,000 tokens with 20 logprobs each are 1.4 MB, which the store writes and sends before the
# next tokens: 26-41 ms on two cores. With prompt_logprobs=1 a step of 8,192 tokens is not limited.
MAX_PROMPT_LOGPROBS = 32_768

Place = tuple[SequenceGroup, Sequence]
NO_DRAFTS: Mapping[Sequence, tuple[int, ...]] = MappingProxyType({})


@dataclass(slots=True)
class StepDemand:
    """The tokens and blocks that the running groups of one class need in the next step."""

    decodes: list[Place] = field(default_factory=list)  # lack one token
    prefills: list[Place] = field(default_factory=list)  # lack more: prompts in chunks, and recomputed tokens
    needs_blocks: list[Place] = field(default_factory=list)  # lack a block, or write to a shared one
    incomplete: list[SequenceGroup] = field(default_factory=list)  # have sequences that do not run

    def first_decodes(self, num_slots: int) -> list[Place]:
        """Return the decodes of the oldest groups, as whole groups, until `num_slots` are taken."""
        chosen: list[Place] = []
        for place in self.decodes:
            if len(chosen) >= num_slots and place[0] is not chosen[-1][0]:
                break
            chosen.append(place)
        return chosen

    def drop_preempted(self) -> None:
        """Keep the sequences that still run."""
        for places in (self.decodes, self.prefills, self.needs_blocks):
            places[:] = running_of(places)


def running_of(places: list[Place]) -> list[Place]:
    """Return those whose sequence runs."""
    return [place for place in places if place[1].status is SequenceStatus.RUNNING]


def collect_demand(running: Iterable[SequenceGroup], kv_cache: KVAllocator) -> tuple[StepDemand, StepDemand]:
    """Return the demand of interactive requests, and of background ones."""
    interactive, background = StepDemand(), StepDemand()
    needs_room = kv_cache.needs_room
    for group in running:
        found = background if group.is_background else interactive
        active, may_decode = group.active, group.beam_search is None or group.may_decode
        for sequence in active:
            num_inflight = sequence.num_inflight_tokens
            if num_inflight and ends_with_inflight_token(sequence, group.max_num_tokens):
                continue
            # Sequence.num_tokens without a call, because this is done per running sequence and step.
            num_tokens = len(sequence.prompt_token_ids) + len(sequence.output_token_ids) + num_inflight
            if needs_room(sequence, num_tokens):
                found.needs_blocks.append((group, sequence))
            num_lacking = num_tokens - sequence.kv.num_computed_tokens
            if num_lacking > 1:
                found.prefills.append((group, sequence))
            elif num_lacking and may_decode:
                found.decodes.append((group, sequence))
        if len(active) != len(group.sequences):
            found.incomplete.append(group)
    return interactive, background


def _num_to_checkpoint(sequence: Sequence) -> int:
    """Return the most tokens of the next chunk: it ends where the recurrent state is to be kept."""
    start = sequence.kv.num_computed_tokens
    return next((position - start for position in sequence.kv.checkpoints if position > start), sys.maxsize)


class StepPlan:
    """The sequences of the step that is being planned."""

    def __init__(self, kv_cache: KVAllocator, claim_fork: Callable[[SequenceGroup, Sequence], bool]) -> None:
        """Create an empty plan. `claim_fork`: takes a running slot for a fork, and returns whether one was free."""
        self._claim_fork = claim_fork
        self.sequences: list[ScheduledSequence] = []
        self.num_drafts = 0  # tokens among those of `sequences`
        self._kv_cache = kv_cache
        self._block_size, self._has_states = kv_cache.block_size, kv_cache.has_states

    def add_decodes(self, decodes: Iterable[Place], drafts: Mapping[Sequence, tuple[int, ...]] = NO_DRAFTS) -> None:
        """Add the decodes of sequences that lack one token, with the drafts of some."""
        if not drafts:
            add = self._add
            for group, sequence in decodes:
                add(group, sequence, 1, True)
            return
        for group, sequence in decodes:
            guessed = drafts.get(sequence, ())
            self.num_drafts += len(guessed)
            self._add(group, sequence, 1 + len(guessed), True).drafts = guessed
            if guessed and self._has_states:
                sequence.kv.num_pending_tokens = 1 + len(guessed)

    def add_prefills(self, prefills: Iterator[tuple[SequenceGroup, Sequence]], budget_tokens: int) -> bool:
        """Add prefills within the budget, and return whether one was added. The iterator advances only within budget.

        A prompt waits if the step has no room for its prompt logprobs; later prompts go on.
        """
        num_before, logprobs_left = len(self.sequences), MAX_PROMPT_LOGPROBS
        while budget_tokens > 0 and (prefill := next(prefills, None)) is not None:
            group, sequence = prefill
            num_new_tokens = min(budget_tokens, group.num_prefill_tokens(sequence), _num_to_checkpoint(sequence))
            if logprobs_each := sequence.num_logprobs_of_prompt_token:
                num_new_tokens = min(num_new_tokens, logprobs_left // logprobs_each)
                logprobs_left -= num_new_tokens * logprobs_each
            if num_new_tokens:
                self._add(group, sequence, num_new_tokens, num_new_tokens == sequence.num_uncomputed_tokens)
            budget_tokens -= num_new_tokens
        return len(self.sequences) > num_before

    def _add(self, group: SequenceGroup, sequence: Sequence, num_new_tokens: int, samples: bool) -> ScheduledSequence:
        """Add the next tokens of `sequence`, and the forks of its group that are due with them."""
        kv, num_pending = sequence.kv, 0
        start = kv.num_computed_tokens
        if self._has_states:
            num_pending = self._read_state(sequence)
        end = start + num_new_tokens
        if end // self._block_size > kv.num_published_blocks:  # saves a call, because most steps complete no block
            self._kv_cache.publish(sequence, end)
        kv.num_computed_tokens = end
        sequence.num_inflight_tokens += samples
        scheduled = ScheduledSequence(sequence, start, num_new_tokens, samples, (), num_pending)
        self.sequences.append(scheduled)
        if end >= group.num_prompt_tokens and len(group.active) != len(group.sequences):
            if sequence.sampling.use_beam_search:
                self._fork_beams(group)
            elif samples and end == group.num_prompt_tokens:
                self._fork_new(group, sequence)
        return scheduled

    def _read_state(self, sequence: Sequence) -> int:
        """Keep the recurrent state if it is due, and return how many tokens before the step it does not contain."""
        kv = sequence.kv
        if kv.checkpoints:
            self._kv_cache.take_checkpoint(sequence)
        num_pending, kv.num_pending_tokens = kv.num_pending_tokens, 0
        return num_pending

    def _fork_new(self, group: SequenceGroup, first: Sequence) -> None:
        """Fork the sequences without tokens while slots are free. They sample from the logits of `first`."""
        for child in group.sequences:
            if child.status is not SequenceStatus.WAITING or child.num_tokens > group.num_prompt_tokens:
                continue
            if not self._claim_fork(group, child):
                break
            self._kv_cache.fork(first, child, group.num_prompt_tokens)
            group.activate(child)
            child.num_inflight_tokens += 1
            self.sequences.append(ScheduledSequence(child, group.num_prompt_tokens, 0, samples=True))

    def _fork_beams(self, group: SequenceGroup) -> None:
        """Fork the beams of a preempted search from the first, which has recomputed the prompt."""
        first, *others = group.sequences
        for child in others:
            self._kv_cache.fork(first, child, group.num_prompt_tokens)
            group.activate(child)
