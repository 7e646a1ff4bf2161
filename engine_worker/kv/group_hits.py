"""Prefix hits of several groups: a prefix is reusable only up to where every group has its blocks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from engine_worker.kv.span import KVSpan

Key = TypeVar("Key")


@dataclass(frozen=True, slots=True)
class GroupHit:
    """The blocks of a prefix in one group: to share, then to fetch from the host.

    The first `num_outside_window` blocks of the prefix are not needed, because no attention window reaches them.
    """

    num_outside_window: int = 0
    block_ids: list[int] = field(default_factory=list)
    host_block_ids: list[int] = field(default_factory=list)

    @property
    def num_shared(self) -> int:
        """The length of the prefix on the device, in blocks, with those outside the window."""
        return self.num_outside_window + len(self.block_ids)


def longest_common_hit(
    spans: Sequence[KVSpan],
    keys: Sequence[Sequence[Key]],
    finds: Sequence[Callable[[Key], int | None]],
    start: int = 0,
) -> tuple[int, list[tuple[int, list[int]]]]:
    """Return the longest prefix that every group has, in blocks, and per group (first needed block, block ids).

    Each group gives its longest hit within a limit. The shortest is the next limit, until all are equal: a window may
    have the blocks of a longer prefix and lack those of a shorter one.

    Args:
        spans: Per group.
        keys: Per group, of the same number of full blocks, in order.
        finds: Per group; returns the id of an available block, or None.
        start: Groups with a window search no prefix of up to this many blocks.
    """
    end = len(keys[0])
    while True:
        hits = [
            span.longest_hit(of_group if len(of_group) == end else of_group[:end], find, start)
            for span, of_group, find in zip(spans, keys, finds, strict=True)
        ]
        lengths = {first + len(block_ids) for first, block_ids in hits}
        if len(lengths) == 1:
            return lengths.pop(), hits
        end = min(lengths)
