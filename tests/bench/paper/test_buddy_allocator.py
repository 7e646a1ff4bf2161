"""Buddy allocator of the paper's baselines."""

from random import Random

import pytest

from bench.paper.buddy_allocator import BuddyAllocator


def test_allocation_is_rounded_up_to_a_power_of_two() -> None:
    buddies = BuddyAllocator(8)
    assert [buddies.allocate(3), buddies.allocate(1), buddies.allocate(2)] == [0, 4, 6]
    assert buddies.num_allocated_blocks == 4 + 1 + 2
    assert buddies.can_allocate(1)
    assert not buddies.can_allocate(2), "only block 5 is left"


def test_only_freed_buddies_merge() -> None:
    buddies = BuddyAllocator(8)
    starts = [buddies.allocate(2) for _ in range(4)]
    assert starts == [0, 2, 4, 6]
    buddies.free(2)
    buddies.free(4)
    assert not buddies.can_allocate(3), "2..5 are neighbors, but not buddies"
    buddies.free(0)
    assert buddies.allocate(4) == 0
    buddies.free(6)
    assert buddies.allocate(4) == 4


def test_pool_is_split_into_powers_of_two() -> None:
    """15,700 slots in blocks of 16 hold seven allocations of 2,048 slots, as Orca (Max) batches in the paper."""
    buddies = BuddyAllocator(981)
    starts = []
    while buddies.can_allocate(128):
        starts.append(buddies.allocate(128))
        buddies.check_integrity()
    assert starts == [768, 512, 640, 0, 128, 256, 384], "the smallest run that is large enough is halved first"
    for start in starts:
        buddies.free(start)
        buddies.check_integrity()
    assert buddies.allocate(512) == 0


def test_invalid_allocation_or_release_raises() -> None:
    buddies = BuddyAllocator(4)
    assert not buddies.can_allocate(5)
    with pytest.raises(AssertionError):
        buddies.allocate(5)
    with pytest.raises(KeyError):
        buddies.free(0)
    with pytest.raises(ValueError, match="num_blocks is 0"):
        BuddyAllocator(0)


@pytest.mark.parametrize("seed", range(5))
def test_random_traffic_keeps_the_pool_tiled(seed: int) -> None:
    random = Random(seed)
    num_blocks = random.randrange(1, 200)
    buddies = BuddyAllocator(num_blocks)
    starts: list[int] = []
    for _ in range(500):
        num_wanted = random.randrange(1, 20)
        if random.random() < 0.6 and buddies.can_allocate(num_wanted):
            starts.append(buddies.allocate(num_wanted))
        elif starts:
            buddies.free(starts.pop(random.randrange(len(starts))))
        buddies.check_integrity()
    for start in starts:
        buddies.free(start)
    assert buddies.num_allocated_blocks == 0
    assert buddies.can_allocate(1 << (num_blocks.bit_length() - 1)), "all runs have joined again"
