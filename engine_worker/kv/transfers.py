"""Block moves that one batch makes before its forward pass, and the time that they took."""

from dataclasses import dataclass, field


@dataclass(slots=True, frozen=True)
class BlockCopy:
    """A copy of all layers of one block: on the device for copy-on-write, or between device and host for swaps."""

    source_block_id: int
    target_block_id: int


@dataclass(slots=True)
class Transfers:
    """Blocks to move in one batch, before its forward pass."""

    block_copies: list[BlockCopy] = field(default_factory=list)
    swap_out: list[BlockCopy] = field(default_factory=list)
    swap_in: list[BlockCopy] = field(default_factory=list)
    state_copies: list[BlockCopy] = field(default_factory=list)  # of the state pool; 0 as a source is a state of zeros
    batch_number: int = 0


@dataclass(slots=True, frozen=True)
class TransferTime:
    """The time that the transfers of one batch took on the device's copy streams."""

    batch_number: int
    swap_out_seconds: float = 0.0
    swap_in_seconds: float = 0.0
