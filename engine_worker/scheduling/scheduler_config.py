"""The limits of a step, validated once. Their defaults are the worker's settings."""

from dataclasses import dataclass

from shared.messages import max_beam_width


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    # Maximum prompt tokens in a step that also decodes, which bounds the gap between two tokens of running streams;
    # None: the rest of the budget. SmolLM2 on 2 CPU cores prefills 1,400 tokens/s, so 256 is a gap of 0.2 s.
    max_prefill_tokens_with_decodes: int | None = None

    def __post_init__(self) -> None:
        if self.max_num_seqs < 1:
            raise ValueError(f"max_num_seqs: expected at least 1; got {self.max_num_seqs}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens: expected at least max_num_seqs, {self.max_num_seqs}, so that a step can "
                f"decode every running sequence; got {self.max_num_batched_tokens}"
            )
        if self.max_model_len < 2:
            raise ValueError(
                f"max_model_len: expected at least 2, a prompt token and an output token; got {self.max_model_len}"
            )
        cap = self.max_prefill_tokens_with_decodes
        if cap is not None and cap < 1:
            raise ValueError(f"max_prefill_tokens_with_decodes: expected at least 1; got {cap}")

    @property
    def max_beam_width(self) -> int:
        return max_beam_width(self.max_num_seqs)

    def prefill_budget(self, num_decodes: int) -> int:
        """Return the prompt tokens of a step that also decodes `num_decodes` sequences."""
        budget, cap = self.max_num_batched_tokens - num_decodes, self.max_prefill_tokens_with_decodes
        return budget if cap is None or num_decodes == 0 else min(budget, cap)
