"""Block moves that one batch makes before its forward pass, and the time that they took."""

from dataclasses import dataclass, field


@dataclass(slots=True, frozen=True)
class BlockCopy:
    """A copy of all layers of one block: on the device for copy-on-write, or between device and host for swaps."""

    source_block_id: int
    target_block_id: int


@dataclass(slots=True)
class Moves:
    """Moves of the blocks of one pool, in this order; no target of `copies` is also a source of them."""

    swap_out: list[BlockCopy] = field(default_factory=list)  # device block -> host block
    swap_in: list[BlockCopy] = field(default_factory=list)  # host block -> device block, which the next batch may read
    copies: list[BlockCopy] = field(default_factory=list)  # device block -> device block

    def __bool__(self) -> bool:
        return bool(self.swap_out or self.swap_in or self.copies)


@dataclass(slots=True)
class Transfers:
    """The blocks to move in one batch, before its forward pass."""

    kv: Moves = field(default_factory=Moves)
    states: Moves = field(default_factory=Moves)  # of recurrent states; a copy from block 0 is a state of zeros
    batch_number: int = 0

    def __bool__(self) -> bool:
        return bool(self.kv or self.states)


@dataclass(slots=True, frozen=True)
class TransferTime:
    """The time that the transfers of one batch and pool took on the device's copy streams."""

    batch_number: int
    swap_out_seconds: float = 0.0
    swap_in_seconds: float = 0.0
