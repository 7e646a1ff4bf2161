"""The tokens of one step, while they are chosen: what is added counts as computed, and forks what becomes due with it.

Decides nothing of order or budget: those are the scheduler's.
"""

from collections.abc import Iterable, Iterator

from engine_worker.scheduling.batch import ScheduledSequence
from engine_worker.scheduling.kv_cache_manager import KVCacheManager
from engine_worker.scheduling.sequence import Sequence, SequenceStatus
from engine_worker.scheduling.sequence_group import SequenceGroup


class StepPlan:
    def __init__(self, kv_cache: KVCacheManager) -> None:
        self.sequences: list[ScheduledSequence] = []
        self._kv_cache = kv_cache
        self._block_size = kv_cache.block_size

    def add_decodes(self, decodes: Iterable[tuple[SequenceGroup, Sequence]]) -> None:
        """Of sequences that lack one token."""
        for group, sequence in decodes:
            self._add(group, sequence, 1, samples=True)

    def add_prefills(self, prefills: Iterator[tuple[SequenceGroup, Sequence]], budget_tokens: int) -> bool:
        """What fits of sequences that lack more, each asked for when there is budget for it; whether there was one."""
        num_before = len(self.sequences)
        while budget_tokens > 0 and (prefill := next(prefills, None)) is not None:
            group, sequence = prefill
            num_new_tokens = min(budget_tokens, group.num_prefill_tokens(sequence))
            self._add(group, sequence, num_new_tokens, samples=num_new_tokens == sequence.num_uncomputed_tokens)
            budget_tokens -= num_new_tokens
        return len(self.sequences) > num_before

    def _add(self, group: SequenceGroup, sequence: Sequence, num_new_tokens: int, *, samples: bool) -> None:
        """The next tokens of `sequence`, and the forks of its group that become due with them."""
        start = sequence.num_computed_tokens
        end = start + num_new_tokens
        if end // self._block_size > sequence.num_published_blocks:  # asked here, as most steps complete no block
            self._kv_cache.publish(sequence, end)
        sequence.num_computed_tokens = end
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
