"""Contiguous runs of blocks by buddy allocation, as the paper's Orca baselines allocate them.

A pool is cut into runs of powers of two, largest first. A request for n blocks gets the smallest run that holds it, by
halving larger ones. A freed run joins its buddy.
"""

from collections import defaultdict
from heapq import heapify, heappop, heappush


class BuddyAllocator:
    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks is {num_blocks}; it must be at least 1")
        self.num_blocks = num_blocks
        self._free: defaultdict[int, list[int]] = defaultdict(list)  # order -> heap of starts of free runs
        self._orders: dict[int, int] = {}  # start of an allocated run -> order
        self._top: dict[int, int] = {}  # start of an initial run -> order; it has no buddy above
        start = 0
        for order in reversed(range(num_blocks.bit_length())):
            if num_blocks >> order & 1:
                self._free[order].append(start)
                self._top[start] = order
                start += 1 << order

    @property
    def num_allocated_blocks(self) -> int:
        """Blocks of allocated runs, which are more than requested."""
        return sum(1 << order for order in self._orders.values())

    def can_allocate(self, num_blocks: int) -> bool:
        return self._order_to_split(num_blocks) is not None

    def allocate(self, num_blocks: int) -> int:
        """Return the first block of a run of at least `num_blocks`; can_allocate() must be true."""
        order = self._order_to_split(num_blocks)
        assert order is not None, f"no free run of {num_blocks} blocks"
        start = heappop(self._free[order])
        while order > _order_of(num_blocks):
            order -= 1
            heappush(self._free[order], start + (1 << order))
        self._orders[start] = order
        return start

    def free(self, start: int) -> None:
        order = self._orders.pop(start)
        while not self._is_whole_tree(start, order):
            buddy = self._buddy(start, order)
            if buddy not in self._free[order]:
                break
            self._free[order].remove(buddy)
            heapify(self._free[order])
            start, order = min(start, buddy), order + 1
        heappush(self._free[order], start)

    def check_integrity(self) -> None:
        """Assert that free and allocated runs tile the pool, and that free buddies are joined."""
        free = [(start, order) for order, starts in self._free.items() for start in starts]
        end = 0
        for start, order in sorted(free + list(self._orders.items())):
            assert start == end, f"blocks {end}..{start} are in no run, or in two"
            end = start + (1 << order)
        assert end == self.num_blocks
        for start, order in free:
            alone = self._is_whole_tree(start, order) or (self._buddy(start, order), order) not in free
            assert alone, f"run {start} and its buddy are both free"

    def _order_to_split(self, num_blocks: int) -> int | None:
        orders = range(_order_of(num_blocks), self.num_blocks.bit_length())
        return next((order for order in orders if self._free[order]), None)

    def _is_whole_tree(self, start: int, order: int) -> bool:
        return self._top.get(start) == order

    def _tree_of(self, block: int) -> int:
        return max(start for start in self._top if start <= block)

    def _buddy(self, start: int, order: int) -> int:
        tree = self._tree_of(start)
        return tree + ((start - tree) ^ (1 << order))


def _order_of(num_blocks: int) -> int:
    return max(0, num_blocks - 1).bit_length()
