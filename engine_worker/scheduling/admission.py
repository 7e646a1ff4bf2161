"""Which waiting sequences get a running slot and blocks in a step.

The first sequence of a request goes before further sequences of running requests, which fork from one that still holds
the prompt's blocks, or start from the prefix cache. While other requests wait, no request forks into the last eighth of
the slots. Beams need all their slots at once: while they wait, every second slot that becomes free is kept for them.
"""

from collections.abc import Iterable, Iterator

from engine_worker.kv.kv_allocator import KVAllocator
from engine_worker.kv.sequence import Sequence, SequenceStatus
from engine_worker.scheduling.background_share import BackgroundShare
from engine_worker.scheduling.claim_budget import PrefillEstimator
from engine_worker.scheduling.policy import FairShare
from engine_worker.scheduling.running_slots import RunningSlots
from engine_worker.scheduling.sequence_group import SequenceGroup
from engine_worker.scheduling.step_plan import Place

KEPT_RATIO = 8  # while other requests wait, 1/8 of the slots is not used for forks
_BLOCKS = "blocks"


class Admission:
    def __init__(
        self,
        kv_cache: KVAllocator,
        policy: FairShare,
        slots: RunningSlots,
        background_share: BackgroundShare,
        estimator: PrefillEstimator,
    ) -> None:
        """Create the admission.

        Args:
            kv_cache: Gives blocks to sequences.
            policy: The queue of waiting groups.
            slots: The running slots.
            background_share: The limits of background requests.
            estimator: Is updated with each admitted prompt.
        """
        self.running: dict[str, SequenceGroup] = {}  # by request id, in order of admission
        self.waits_for = ""  # what the first group of the queue lacked in the last step
        self._kv_cache = kv_cache
        self._policy = policy
        self._slots = slots
        self._background_share = background_share
        self._estimator = estimator
        self._lacks_blocks: SequenceGroup | None = None  # the first group of the queue, if it lacked blocks
        self._waiting_beams: SequenceGroup | None = None  # the first beam search that lacked slots
        # State of the step that is being planned:
        self._may_admit = True
        self._yielded: SequenceGroup | None = None
        self._incomplete: list[SequenceGroup] = []  # running groups with waiting sequences
        self._sources: dict[SequenceGroup, Sequence | None] = {}  # groups with a computed prompt: what they fork from
        self._num_promised_blocks = 0  # for forks, which allocate them in the next step

    def begin_step(
        self, incomplete: Iterable[SequenceGroup], *, has_preempted: bool, yielded: SequenceGroup | None
    ) -> None:
        """Plan a new step.

        Args:
            incomplete: Running groups with sequences that wait, oldest first.
            has_preempted: Whether a sequence was preempted for blocks; then this step admits nothing.
            yielded: The group that yielded a slot to another tenant; it gets none in the same step.
        """
        self._yielded = yielded
        self._may_admit = not has_preempted
        self.waits_for = _BLOCKS if has_preempted else "its share of a step"
        self._num_promised_blocks = 0
        # Collected before anything is planned, because a fork copies what an earlier step computed.
        self._incomplete = [group for group in incomplete if group.active]
        self._sources = {
            group: self._fork_source(group)
            for group in self._incomplete
            if all(sequence.kv.num_computed_tokens >= group.num_prompt_tokens for sequence in group.active)
        }

    def admit(self, *, is_background: bool) -> Iterator[Place]:
        """Yield sequences with their slots and blocks; each is admitted when the iterator advances."""
        while self._may_admit:
            place = self._admit_first(is_background) or self._admit_fork(is_background)
            if place is None:
                return
            yield place

    def claim_fork(self, group: SequenceGroup, child: Sequence) -> bool:
        """Take a slot for `child`, which forks in this step at the end of the prompt. Return whether one was free."""
        if not self._may_admit or not self._may_fork(group) or self._kv_cache.num_available_states == 0:
            return False
        num_blocks = self._num_fork_blocks(group, child, group.num_prompt_tokens)
        if self._num_spare_blocks(group) < num_blocks:
            return False
        self._num_promised_blocks += num_blocks
        self._take(group, 1)
        return True

    def blocked(self) -> Iterator[tuple[SequenceGroup, int]]:
        """Yield interactive groups that could run if another tenant yielded a slot, each with the slots it needs.

        These are the first group of each tenant with more waiting requests than free slots, and the group that lacked
        blocks in the last step.
        """
        num_free = self._slots.num_free
        for group in self._policy.heads(is_background=False):
            if group is self._lacks_blocks:
                yield group, group.num_slots_to_start
            elif group.num_slots_to_start > num_free or self._policy.num_ready_of(group) > num_free:
                yield group, max(group.num_slots_to_start, num_free + 1)

    def headroom_blocks(self, num_slots: int) -> int:
        """Return the blocks that an admission leaves free: one per sequence and group of layers.

        So block_size steps preempt none.
        With swapping half as many, because a swap hardly slows the other sequences (ADR 0048).
        """
        num_blocks = (self._slots.num_taken + num_slots) * len(self._kv_cache.spans.groups) if self.running else 0
        return -(-num_blocks // 2) if self._kv_cache.may_swap else num_blocks

    def _admit_first(self, is_background: bool) -> Place | None:
        """Admit the first group of the queue, or one that may pass beams that wait for slots."""
        if is_background and self._policy.num_ready(is_background=False):
            return None
        self._waiting_beams = self._lacks_blocks = None
        for number, group in enumerate(self._policy.candidates(is_background=is_background)):
            lacking = self._lacking(group)
            if number == 0:
                self.waits_for = lacking
            if not lacking:
                return self._start(group)
            if not group.sampling.use_beam_search or not self._lacks_slots(group):
                self._lacks_blocks = group if lacking == _BLOCKS else None
                break
            self._waiting_beams = self._waiting_beams or group
        return None

    def _lacks_slots(self, group: SequenceGroup) -> bool:
        return group.num_slots_to_start > self._slots.num_free - self._num_owed_slots

    def _lacking(self, group: SequenceGroup) -> str:
        """Give `group` its blocks if there are slots and blocks for it. Return what it lacks; "": nothing."""
        num_slots = group.num_slots_to_start
        if self._lacks_slots(group):
            return "a running slot" if num_slots == 1 else f"{num_slots} running slots"
        if group is self._yielded:
            return "a slot of its share"
        if group.is_background and not self._background_share.has_slots(self._slots.num_background, num_slots):
            return "a running slot of its class"
        waiting = group.sequences if group.sampling.use_beam_search else [group.next_waiting]
        if any(sequence.num_inflight_tokens for sequence in waiting):  # it has just been preempted
            return "its token in flight"
        return "" if self._try_start(group, waiting) else _BLOCKS

    def _try_start(self, group: SequenceGroup, waiting: list[Sequence]) -> bool:
        """Allocate blocks for what starts now, if there is also room for the beams that fork from it."""
        first, *beams = waiting
        num_spare = self._num_spare_blocks(group)
        if first.status is SequenceStatus.SWAPPED:
            started, is_admitted = waiting, self._try_swap_in(waiting, num_spare)
        else:
            num_spare -= sum(self._num_fork_blocks(group, beam, group.num_prompt_tokens) for beam in beams)
            started, is_admitted = [first], self._try_admit(first, num_spare)
            if is_admitted and not group.has_started:
                group.num_cached_tokens = first.num_cached_tokens
                self._estimator.admitted(group)
        for sequence in started if is_admitted else ():
            group.activate(sequence)
        return is_admitted

    def _start(self, group: SequenceGroup) -> Place:
        self._policy.remove(group)
        self.running[group.request_id] = group
        self._take(group, group.num_slots)
        group.num_owed_slots = 0
        if not group.sampling.use_beam_search and not group.is_complete:
            self._incomplete.append(group)
        return group, group.active[0]

    def _admit_fork(self, is_background: bool) -> Place | None:
        groups = [group for group in self._sources if group.is_background is is_background and group.active]
        groups.sort(key=lambda group: self._slots.usage_with(group.tenant, 1, is_background=is_background))
        for group in groups:
            child = None if group.is_complete else group.next_waiting
            if child is None or child.num_inflight_tokens or not self._may_fork(group):
                continue
            if not self._try_fork(group, child, self._sources[group]):
                return None
            group.activate(child)
            self._take(group, 1)
            return group, child
        return None

    def _try_fork(self, group: SequenceGroup, child: Sequence, source: Sequence | None) -> bool:
        """Give `child` its KV: its own from host memory, that of `source`, or that of the prefix cache."""
        num_spare = self._num_spare_blocks(group)
        if child.status is SequenceStatus.SWAPPED:
            return self._try_swap_in([child], num_spare)
        if source is None or source.status is not SequenceStatus.RUNNING:
            return self._try_admit(child, num_spare)
        # A child without tokens computes the prompt's last token again, because it needs its logits.
        num_tokens = group.num_prompt_tokens - (child.num_output_tokens == 0)
        if self._num_fork_blocks(group, child, num_tokens) > num_spare:
            return False
        self._kv_cache.fork(source, child, num_tokens)
        self._kv_cache.allocate(child)
        return True

    def _may_fork(self, group: SequenceGroup) -> bool:
        """Return whether a slot is left for another sequence of `group`, after those that go before it."""
        if self._slots.is_at_limit(group.tenant) or self._lacks_blocks is not None or group is self._yielded:
            return False
        num_first = self._policy.num_ready(is_background=False)
        if group.is_background:
            num_first += self._policy.num_ready(is_background=True)
            if num_first or not self._background_share.has_slots(self._slots.num_background, 1):
                return False
        has_others = num_first > 0 or any(
            other is not group and not other.is_complete and other.active for other in self._incomplete
        )
        num_kept = self._slots.num_slots // KEPT_RATIO if has_others else 0
        return self._slots.num_free - self._num_owed_slots - num_first > num_kept

    def _take(self, group: SequenceGroup, num_slots: int) -> None:
        self._slots.take(group.tenant, num_slots, is_background=group.is_background)
        if self._waiting_beams is not None:  # reserve the next free slot for the beams
            self._waiting_beams.num_owed_slots += num_slots

    @property
    def _num_owed_slots(self) -> int:
        return 0 if self._waiting_beams is None else self._waiting_beams.num_owed_slots

    def _try_admit(self, sequence: Sequence, num_spare_blocks: int) -> bool:
        return self._kv_cache.try_admit(sequence, self._kv_cache.num_available_blocks - num_spare_blocks)

    def _try_swap_in(self, sequences: list[Sequence], num_spare_blocks: int) -> bool:
        return self._kv_cache.try_swap_in(sequences, self._kv_cache.num_available_blocks - num_spare_blocks)

    def _num_spare_blocks(self, group: SequenceGroup) -> int:
        """Return the blocks for new sequences of `group`; below 0 if other sequences need more than there are."""
        num_slots = 1 if group.active else group.num_slots_to_start
        num_kept = self.headroom_blocks(num_slots) + self._num_promised_blocks
        if group.is_background and self.running:
            num_kept += self._background_share.reserved_blocks
        return self._kv_cache.num_available_blocks - num_kept

    def _num_fork_blocks(self, group: SequenceGroup, child: Sequence, num_shared_tokens: int) -> int:
        """Return the blocks of `child` without the full blocks that hold `num_shared_tokens` of the prompt."""
        return self._kv_cache.spans.own_blocks(child.num_tokens, num_shared_tokens)

    def _fork_source(self, group: SequenceGroup) -> Sequence | None:
        """Return a running sequence that still holds the whole prompt."""
        num_tokens = group.num_prompt_tokens - 1
        return next((sequence for sequence in group.active if self._kv_cache.can_fork(sequence, num_tokens)), None)
