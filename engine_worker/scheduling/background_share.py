"""The share of background requests (class `batch`) in a worker: what others leave, but for room in which those begin.

    alone    no interactive request for ALONE_AFTER_STEPS: all of a step, three quarters of the running slots
    beside   a sixteenth of the slots, 1/128 of a step's budget for their prompts; nothing in a step that computes
             an interactive prompt. So a chat that arrives waits for a short step, and shares the next with no batch.

An eighth of the KV cache stays free of newly admitted ones either way. Counted in steps, because nothing here knows
the time: 1,000 are 8 s of an 8B model on an H200.
"""

from engine_worker.scheduling.scheduler_config import SchedulerConfig

ALONE_AFTER_STEPS = 1000
MIN_PREFILL_TOKENS = 8


class BackgroundShare:
    def __init__(self, config: SchedulerConfig, num_usable_blocks: int) -> None:
        self._config = config
        self.reserved_blocks = num_usable_blocks // 8
        self._num_quiet_steps = ALONE_AFTER_STEPS

    def count_step(self, *, has_interactive: bool) -> None:
        self._num_quiet_steps = 0 if has_interactive else self._num_quiet_steps + 1

    @property
    def is_alone(self) -> bool:
        return self._num_quiet_steps >= ALONE_AFTER_STEPS

    @property
    def num_slots(self) -> int:
        """The running slots of the class."""
        num_slots = self._config.max_num_seqs
        return max(1, num_slots * 3 // 4 if self.is_alone else num_slots // 16)

    def has_slots(self, num_taken: int, num_slots: int) -> bool:
        """Whether the class may take `num_slots` more; a request that is alone in its class may."""
        return num_taken == 0 or num_taken + num_slots <= self.num_slots

    def prefill_budget(self, num_decodes: int) -> int:
        """Prompt tokens of a step beside `num_decodes` sequences that decode."""
        budget = self._config.prefill_budget(num_decodes)
        if self.is_alone:
            return budget
        return min(budget, max(MIN_PREFILL_TOKENS, self._config.max_num_batched_tokens // 128))
