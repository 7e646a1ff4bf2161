"""What it costs to move KV between device and host, and to compute it again: measured when the worker starts.

Decides nothing; compares seconds. On an H200 a block of 16 tokens of an 8B model takes about 40 us over PCIe 5 and
360 us to compute, so swapping wins by far; on slower links, or with small models, it need not.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferCosts:
    block_bytes: int
    device_to_host_bytes_per_second: float
    host_to_device_bytes_per_second: float
    prefill_tokens_per_second: float
    fetch_seconds: float = 0.0  # of any fetch from the host, however small: the step that it waits

    def store_seconds(self, num_blocks: int) -> float:
        return num_blocks * self.block_bytes / self.device_to_host_bytes_per_second

    def link_seconds(self, num_blocks: int) -> float:
        """From the host, of the transfer alone."""
        return num_blocks * self.block_bytes / self.host_to_device_bytes_per_second

    def load_seconds(self, num_blocks: int) -> float:
        """From the host, until it can be used: what a sequence waits."""
        return self.fetch_seconds + self.link_seconds(num_blocks)

    def compute_seconds(self, num_tokens: int) -> float:
        return num_tokens / self.prefill_tokens_per_second
