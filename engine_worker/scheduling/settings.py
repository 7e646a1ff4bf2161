"""The scheduling part of the worker's settings. Values that depend on the device are None until `for_device()`."""

from dataclasses import dataclass, replace

from engine_worker.scheduling.speculation.config import SpeculativeConfig
from engine_worker.scheduling.speculation.setting import parse_speculative_config
from shared.settings import SettingsError, parse_count, setting

PREEMPTION_MODES = ("auto", "swap", "recompute")
OFFLOADED_PREFIXES = ("reused", "all")

# By device. Two cores prefill SmolLM2 at about 1,400 tokens/s, so 256 prompt tokens pause other streams for 0.2 s. On a
# CPU, scheduling cannot overlap with the model, because both use the same cores.
MAX_PREFILL_TOKENS_WITH_DECODES = {"cpu": 256, "cuda": None}
ASYNC_SCHEDULING = {"cpu": False, "cuda": True}


@dataclass(frozen=True, kw_only=True)
class SchedulingSettings:
    preemption_mode: str = setting(
        "auto", choices=PREEMPTION_MODES, help="how a preempted sequence gets its KV back; auto: the faster way"
    )
    offloaded_prefixes: str = setting(
        "reused",
        choices=OFFLOADED_PREFIXES,
        help="evicted prefixes to keep in host memory; reused: only those that a second request has used",
    )
    enable_prefix_caching: bool = setting(True, help="share the KV of common prefixes between requests")
    max_prefill_tokens_with_decodes: int | None = setting(
        None,
        parse=parse_count,
        help="maximum prompt tokens in a step that also decodes; "
        f"default: {MAX_PREFILL_TOKENS_WITH_DECODES['cpu']} on cpu, the rest of the budget on cuda",
    )
    async_scheduling: bool | None = setting(
        None, help="schedule a step while the previous one runs; default: off on cpu, on on cuda"
    )

    speculative_config: str = setting(
        "",
        metavar="JSON",
        help='speculative decoding, for example {"method": "ngram", "num_speculative_tokens": 3}; default: off',
    )

    @property
    def speculation(self) -> SpeculativeConfig | None:
        """The parsed --speculative-config; None: no speculative decoding."""
        return parse_speculative_config(self.speculative_config) if self.speculative_config else None

    def __post_init__(self) -> None:
        _ = self.speculation
        cap = self.max_prefill_tokens_with_decodes
        if cap is not None and cap < 1:
            raise SettingsError(f"--max-prefill-tokens-with-decodes: expected at least 1, got {cap}")

    def for_device(self, device: str, swap_space_bytes: int) -> "SchedulingSettings":
        """Return these settings with every None that depends on the device (`cpu` or `cuda`) filled in.

        Raises:
            SettingsError: If preempted sequences are to be swapped without swap space, or the device cannot make or
                check the drafts.
        """
        if self.preemption_mode == "swap" and swap_space_bytes == 0:
            raise SettingsError("--preemption-mode swap: expected --swap-space-bytes of at least 1, got 0")
        if self.speculation is not None:
            self.speculation.check_place(device)
        cap, ahead = self.max_prefill_tokens_with_decodes, self.async_scheduling
        return replace(
            self,
            max_prefill_tokens_with_decodes=cap or MAX_PREFILL_TOKENS_WITH_DECODES[device],
            async_scheduling=ASYNC_SCHEDULING[device] if ahead is None else ahead,
        )
