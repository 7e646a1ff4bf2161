"""The share of background requests (class `batch`) in a worker: what interactive requests leave, minus a reserve.

    alone    no interactive request for ALONE_AFTER_STEPS: a whole step's budget, 3/4 of the running slots
    shared   1/16 of the slots, 1/128 of a step's token budget for prompts, and no prompts in a step that computes an
             interactive prompt; so a new chat waits for a short step and shares the next with no batch prompt

In both cases 1/8 of the KV cache stays free of newly admitted background requests. Time is counted in steps, because
the scheduler has no clock: 1,000 steps are 8 s for an 8B model on an H200.
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
        """Count a step; one with interactive requests restarts the count."""
        self._num_quiet_steps = 0 if has_interactive else self._num_quiet_steps + 1

    @property
    def is_alone(self) -> bool:
        """Whether no interactive request was there for ALONE_AFTER_STEPS."""
        return self._num_quiet_steps >= ALONE_AFTER_STEPS

    @property
    def num_slots(self) -> int:
        """The running slots of the class."""
        num_slots = self._config.max_num_seqs
        return max(1, num_slots * 3 // 4 if self.is_alone else num_slots // 16)

    def has_slots(self, num_taken: int, num_slots: int) -> bool:
        """Return whether the class may take `num_slots` more. A single request always may."""
        return num_taken == 0 or num_taken + num_slots <= self.num_slots

    def prefill_budget(self, num_decodes: int) -> int:
        """Return the prompt tokens of a step that also decodes `num_decodes` sequences."""
        budget = self._config.prefill_budget(num_decodes)
        if self.is_alone:
            return budget
        return min(budget, max(MIN_PREFILL_TOKENS, self._config.max_num_batched_tokens // 128))
