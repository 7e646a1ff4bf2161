"""What the running sequences want of the next step, in one pass: it meets every sequence in every step.

    decodes   lack one token
    behind    lack more: prompts in chunks, and what is computed again
    needing   lack a block, or write into one that others share: by group, because a group gets all it needs or yields

Oldest group first in each, interactive requests apart from those of the class `batch`. One whose last token is in
flight wants nothing. Decides nothing.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from engine_worker.scheduling.kv_cache_manager import KVCacheManager
from engine_worker.scheduling.sequence import Sequence
from engine_worker.scheduling.sequence_group import SequenceGroup
from engine_worker.scheduling.stop_conditions import ends_with_inflight_token


@dataclass(slots=True)
class Survey:
    decodes: list[tuple[SequenceGroup, Sequence]] = field(default_factory=list)
    behind: list[tuple[SequenceGroup, Sequence]] = field(default_factory=list)
    needing: list[tuple[SequenceGroup, list[Sequence]]] = field(default_factory=list)

    def first_decodes(self, num_seats: int) -> list[tuple[SequenceGroup, Sequence]]:
        """Those of the oldest groups, as whole groups, until so many seats are taken."""
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


def survey(running: Iterable[SequenceGroup], kv_cache: KVCacheManager) -> tuple[Survey, Survey]:
    """(of interactive requests, of the class `batch`)."""
    interactive, batch = Survey(), Survey()
    needs_room = kv_cache.needs_room
    for group in running:
        found = batch if group.is_batch else interactive
        may_decode, needing = group.may_decode, None
        for sequence in group.active:
            if sequence.num_inflight_tokens and ends_with_inflight_token(sequence, group.max_num_tokens):
                continue
            num_tokens = sequence.num_tokens
            if needs_room(sequence, num_tokens):
                needing = [sequence] if needing is None else [*needing, sequence]
            num_lacking = num_tokens - sequence.num_computed_tokens
            if num_lacking > 1:
                found.behind.append((group, sequence))
            elif num_lacking and may_decode:
                found.decodes.append((group, sequence))
        if needing is not None:
            found.needing.append((group, needing))
    return interactive, batch
