"""The bounds of a step, checked once. Knows no defaults: those are the worker's settings.

It is used once, at a worker's start, by the scheduler.
"""

from dataclasses import dataclass

from shared.messages import max_beam_width


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    # Bounds the gap between two tokens of running streams: at most this many prompt tokens in a step that also decodes
    # (None: the rest of the budget). SmolLM2 on 2 CPU cores prefills ~1400 tok/s, so 256 is a gap of ~0.2 s.
    max_prefill_tokens_with_decodes: int | None = None

    def __post_init__(self) -> None:
        if self.max_num_seqs < 1:
            raise ValueError(f"max_num_seqs is {self.max_num_seqs}; it must be at least 1")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}, below max_num_seqs = {self.max_num_seqs}: "
                "a step could not decode every running sequence"
            )
        if self.max_model_len < 2:
            raise ValueError(f"max_model_len is {self.max_model_len}; a prompt and an output token need at least 2")
        cap = self.max_prefill_tokens_with_decodes
        if cap is not None and cap < 1:
            raise ValueError(f"max_prefill_tokens_with_decodes is {cap}; prompts would starve")

    @property
    def max_beam_width(self) -> int:
        return max_beam_width(self.max_num_seqs)

    def prefill_budget(self, num_decodes: int) -> int:
        """Prompt tokens of a step beside `num_decodes` sequences that decode."""
        budget, cap = self.max_num_batched_tokens - num_decodes, self.max_prefill_tokens_with_decodes
        return budget if cap is None or num_decodes == 0 else min(budget, cap)
