"""Counts of the blocks of a KV cache, for metrics, heartbeats, and tests."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheStats:
    """Blocks on the device by state: free + cached + active == num_blocks, without block 0, the padding."""

    block_size: int
    num_blocks: int
    num_free_blocks: int
    num_cached_blocks: int
    num_active_blocks: int
    num_wasted_slots: int  # internal fragmentation: slots of active blocks without a computed token
    sharing_ratio: float  # blocks saved by sharing: 1 - active blocks / entries in all block tables
    num_host_blocks: int = 0  # in host memory: swapped + cached + free
    num_host_cached_blocks: int = 0
    num_host_free_blocks: int = 0
    num_state_blocks: int = 0  # of the state pool, without block 0; 0: the model has no recurrent layers
    num_free_state_blocks: int = 0
    num_cached_state_blocks: int = 0  # checkpoints
    num_host_state_blocks: int = 0  # in host memory: swapped + cached + free
    num_free_host_state_blocks: int = 0
    num_cached_host_state_blocks: int = 0
    group_blocks: tuple[int, ...] = ()  # entries in the block tables of running sequences, per group of layers

    @property
    def num_available_blocks(self) -> int:
        """The blocks that can be allocated: free ones, and cached ones, which are evicted."""
        return self.num_free_blocks + self.num_cached_blocks

    @property
    def usage_ratio(self) -> float:
        return self.num_active_blocks / self.num_blocks
