"""The tokens of one step: what the running sequences want of it, and what of that is chosen.

    survey()    one pass over every running sequence, in every step:
                decodes   lack one token
                behind    lack more: prompts in chunks, and what is computed again
                needing   lack a block, or write into one that others share: by group, because a group gets all it needs
                          or yields
    StepPlan    what is added to it counts as computed, and forks what becomes due with it

Oldest group first in each list, interactive requests apart from those in the background. A sequence whose last token
is in flight wants nothing. Order and budget are decided by the scheduler, not here.

It is used in every step, between who runs and which blocks they get. It knows counts of tokens, no blocks and no
device.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from engine_worker.scheduling.batch import ScheduledSequence
from engine_worker.scheduling.kv_slots import KVSlots
from engine_worker.scheduling.sequence import Sequence, SequenceStatus, ends_with_inflight_token
from engine_worker.scheduling.sequence_group import SequenceGroup

# Log-probabilities of prompts in a step: 8,000 tokens with 20 likeliest ones each are 1.4 MB which the store takes,
# sends and keeps before the next tokens, 26 to 41 ms on two cores. With one likeliest one a step of 8,192 is whole.
MOST_PROMPT_LOGPROBS = 32_768


@dataclass(slots=True)
class Survey:
    """The tokens and blocks that the running groups of one class want of the next step."""

    decodes: list[tuple[SequenceGroup, Sequence]] = field(default_factory=list)
    behind: list[tuple[SequenceGroup, Sequence]] = field(default_factory=list)
    needing: list[tuple[SequenceGroup, list[Sequence]]] = field(default_factory=list)

    def first_decodes(self, num_seats: int) -> list[tuple[SequenceGroup, Sequence]]:
        """The decodes of the oldest groups, as whole groups, until `num_seats` are taken."""
        chosen: list[tuple[SequenceGroup, Sequence]] = []
        for place in self.decodes:
            if len(chosen) >= num_seats and place[0] is not chosen[-1][0]:
                break
            chosen.append(place)
        return chosen

    def drop(self, groups: Iterable[SequenceGroup]) -> None:
        """These have lost their place."""
        dropped = set(groups)
        self.decodes = [place for place in self.decodes if place[0] not in dropped]
        self.behind = [place for place in self.behind if place[0] not in dropped]


def survey(running: Iterable[SequenceGroup], kv_cache: KVSlots) -> tuple[Survey, Survey]:
    """(of interactive requests, of background ones)."""
    interactive, background = Survey(), Survey()
    needs_room = kv_cache.needs_room
    for group in running:
        found = background if group.is_background else interactive
        may_decode, needing = group.may_decode, None
        for sequence in group.active:
            if sequence.num_inflight_tokens and ends_with_inflight_token(sequence, group.max_num_tokens):
                continue
            num_tokens = sequence.num_tokens
            if needs_room(sequence, num_tokens):
                needing = [sequence] if needing is None else [*needing, sequence]
            num_lacking = num_tokens - sequence.kv.num_computed_tokens
            if num_lacking > 1:
                found.behind.append((group, sequence))
            elif num_lacking and may_decode:
                found.decodes.append((group, sequence))
        if needing is not None:
            found.needing.append((group, needing))
    return interactive, background


class StepPlan:
    def __init__(self, kv_cache: KVSlots) -> None:
        self.sequences: list[ScheduledSequence] = []
        self._kv_cache = kv_cache
        self._block_size = kv_cache.block_size

    def add_decodes(self, decodes: Iterable[tuple[SequenceGroup, Sequence]]) -> None:
        """Add the decodes of sequences that lack one token."""
        for group, sequence in decodes:
            self._add(group, sequence, 1, samples=True)

    def add_prefills(self, prefills: Iterator[tuple[SequenceGroup, Sequence]], budget_tokens: int) -> bool:
        """Add what fits of sequences that lack more, each asked for when there is budget; whether there was one.

        A prompt for whose log-probabilities this step has no more room waits, and those behind it do not.
        """
        num_before, logprobs_left = len(self.sequences), MOST_PROMPT_LOGPROBS
        while budget_tokens > 0 and (prefill := next(prefills, None)) is not None:
            group, sequence = prefill
            num_new_tokens = min(budget_tokens, group.num_prefill_tokens(sequence))
            if logprobs_each := sequence.num_logprobs_of_prompt_token:
                num_new_tokens = min(num_new_tokens, logprobs_left // logprobs_each)
                logprobs_left -= num_new_tokens * logprobs_each
            if num_new_tokens:
                self._add(group, sequence, num_new_tokens, samples=num_new_tokens == sequence.num_uncomputed_tokens)
            budget_tokens -= num_new_tokens
        return len(self.sequences) > num_before

    def _add(self, group: SequenceGroup, sequence: Sequence, num_new_tokens: int, *, samples: bool) -> None:
        """The next tokens of `sequence`, and the forks of its group that become due with them."""
        kv = sequence.kv
        start = kv.num_computed_tokens
        end = start + num_new_tokens
        if end // self._block_size > kv.num_published_blocks:  # asked here, as most steps complete no block
            self._kv_cache.publish(sequence, end)
        kv.num_computed_tokens = end
        sequence.num_inflight_tokens += samples
        self.sequences.append(ScheduledSequence(sequence, start, num_new_tokens, samples))
        if end >= group.num_prompt_tokens and not group.is_forked:
            self._fork(group, samples and end == group.num_prompt_tokens)

    def _fork(self, group: SequenceGroup, samples: bool) -> None:
        """All others share the first one's prompt; if it `samples` at the prompt's end, those without tokens do too."""
        first, *others = group.sequences
        for child in others:
            is_new = child.num_output_tokens == 0
            # Without its own place in this step a new one computes the prompt's last token again to sample.
            self._kv_cache.fork(first, child, group.num_prompt_tokens - (is_new and not samples))
            child.status = SequenceStatus.RUNNING
            if is_new and samples:
                child.num_inflight_tokens += 1
                self.sequences.append(ScheduledSequence(child, group.num_prompt_tokens, 0, samples=True))
        group.active = list(group.sequences)
