"""The block pool: allocation, references, the prefix cache's blocks, and errors that check_integrity() detects."""

import pytest

from engine_worker.kv.block_pool import PADDING_BLOCK_ID, BlockPool
from engine_worker.kv.kv_durations import DurationCounts, KVDurations


def test_pool_allocates_every_block_except_padding_once() -> None:
    pool = BlockPool(num_blocks=6)
    assert pool.allocate(5) == [1, 2, 3, 4, 5]
    assert PADDING_BLOCK_ID not in [1, 2, 3, 4, 5]
    assert (pool.num_usable_blocks, pool.num_free_blocks, pool.num_active_blocks) == (5, 0, 5)


def test_pool_last_freed_block_is_allocated_first() -> None:
    pool = BlockPool(num_blocks=6)
    pool.allocate(4)
    pool.free([2])
    pool.free([4])
    assert pool.allocate(3) == [4, 2, 5]


def test_pool_shared_block_is_free_after_last_reference() -> None:
    pool = BlockPool(num_blocks=4)
    table = pool.allocate(2)
    pool.share(table)
    assert (pool.num_active_blocks, pool.num_references, pool.is_shared(table[0])) == (2, 4, True)
    pool.check_integrity([table, table])
    pool.free(table)
    assert (pool.num_active_blocks, pool.num_references, pool.is_shared(table[0])) == (2, 2, False)
    pool.free(table)
    assert (pool.num_active_blocks, pool.num_references, pool.num_free_blocks) == (0, 0, 3)
    pool.check_integrity([])


def test_pool_too_large_allocation_changes_nothing() -> None:
    pool = BlockPool(num_blocks=4)
    table = pool.allocate(2)
    with pytest.raises(AssertionError, match="2 of 1 free and cached blocks"):
        pool.allocate(2)
    pool.check_integrity([table])


def test_pool_double_free_is_detected() -> None:
    pool = BlockPool(num_blocks=4)
    table = pool.allocate(1)
    pool.free(table)
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free(table)


def test_pool_held_block_is_free_after_release() -> None:
    pool = BlockPool(num_blocks=4)
    pool.allocate(3)
    pool.hold(2)
    pool.free([1, 2])
    assert (pool.num_free_blocks, pool.allocate(1)) == (1, [1])
    with pytest.raises(AssertionError, match="still held"):
        pool.check_integrity([[1], [3]])
    pool.release_held()
    pool.check_integrity([[1], [3]])
    assert pool.allocate(1) == [2]


def test_pool_held_block_in_use_survives_release() -> None:
    pool = BlockPool(num_blocks=4)
    table = pool.allocate(2)
    pool.hold(1)
    pool.release_held()
    pool.check_integrity([table])


def test_pool_free_block_cannot_be_held() -> None:
    with pytest.raises(AssertionError, match="not active"):
        BlockPool(num_blocks=4).hold(1)


def test_pool_sharing_free_block_is_detected() -> None:
    with pytest.raises(AssertionError, match="neither active nor cached"):
        BlockPool(num_blocks=4).share([1])


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ([[1]], "references"),  # a missing table
        ([[1, 2], [2]], "references"),  # a block in two tables with one reference
        ([[1, 3]], "references in the block tables"),  # a free block in place of the table's own
        ([[1, 0]], "padding"),
    ],
)
def test_pool_integrity_detects_wrong_tables(tables: list[list[int]], message: str) -> None:
    pool = BlockPool(num_blocks=4)
    assert pool.allocate(2) == [1, 2]
    with pytest.raises(AssertionError, match=message):
        pool.check_integrity(tables)


def test_pool_integrity_detects_used_block_in_free_list() -> None:
    pool = BlockPool(num_blocks=4)
    table = pool.allocate(1)
    pool._free_block_ids.append(table[0])
    with pytest.raises(AssertionError, match="free and in use"):
        pool.check_integrity([table])


def test_pool_integrity_detects_lost_block() -> None:
    pool = BlockPool(num_blocks=4)
    pool._free_block_ids.pop()
    with pytest.raises(AssertionError, match="free \\+ active \\+ cached is 2, not 3"):
        pool.check_integrity([])


KEYS = [(0, bytes([number]) * 32) for number in range(8)]


def published(pool: BlockPool, num_blocks: int) -> list[int]:
    table = pool.allocate(num_blocks)
    assert all(pool.publish(block_id, KEYS[block_id]) for block_id in table)
    return table


def test_pool_freed_published_block_is_cached_and_shareable() -> None:
    pool = BlockPool(num_blocks=6)
    table = published(pool, 2)
    pool.free(table)
    assert (pool.num_free_blocks, pool.num_cached_blocks, pool.num_active_blocks) == (3, 2, 0)
    assert [pool.find(KEYS[block_id]) for block_id in (1, 2, 3)] == [1, 2, None]
    assert [pool.is_cached(block_id) for block_id in (1, 2, 3)] == [True, True, False]
    pool.check_integrity([])
    pool.share([2])
    assert (pool.num_cached_blocks, pool.num_active_blocks, pool.num_references) == (1, 1, 1)
    assert pool.states() == "pcafff"
    pool.check_integrity([[2]])


def test_pool_allocates_free_blocks_then_evicts_lru() -> None:
    evicted = []
    pool = BlockPool(num_blocks=6, on_evict=lambda block_id, key: evicted.append((block_id, key)))
    table = published(pool, 3)
    pool.free(reversed(table))
    pool.share([3])  # used again: now the most recent
    pool.free([3])
    assert pool.allocate(3) == [4, 5, 2]
    assert evicted == [(2, KEYS[2])]
    assert pool.allocate(2) == [1, 3]
    assert evicted == [(2, KEYS[2]), (1, KEYS[1]), (3, KEYS[3])]
    assert pool.find(KEYS[1]) is None
    pool.check_integrity([[1, 2, 3, 4, 5]])


def test_pool_content_is_published_once() -> None:
    pool = BlockPool(num_blocks=6)
    first, second = pool.allocate(2)
    assert pool.publish(first, KEYS[0])
    assert not pool.publish(second, KEYS[0])  # the same content in another block
    assert not pool.publish(first, KEYS[1])  # the same block again
    assert (pool.find(KEYS[0]), pool.find(KEYS[1])) == (first, None)
    pool.free([second, first])
    assert (pool.num_free_blocks, pool.num_cached_blocks) == (4, 1)
    pool.check_integrity([])


def test_pool_held_published_block_can_be_shared() -> None:
    pool = BlockPool(num_blocks=4)
    table = published(pool, 1)
    pool.hold(1)
    pool.free(table)
    assert (pool.num_available_blocks, pool.num_cached_blocks) == (2, 0)
    pool.share([1])
    pool.release_held()
    pool.check_integrity([[1]])


def test_pool_integrity_detects_hash_mismatch() -> None:
    pool = BlockPool(num_blocks=4)
    table = published(pool, 2)
    del pool._by_key[KEYS[1]]
    with pytest.raises(AssertionError, match="blocks and keys disagree"):
        pool.check_integrity([table])


def test_pool_with_only_padding_block_is_refused() -> None:
    with pytest.raises(ValueError, match="num_blocks: expected at least 2"):
        BlockPool(num_blocks=1)


def totals(found: DurationCounts) -> tuple[int, float]:
    return sum(found.counts), found.sum_seconds


def test_pool_durations_are_counted_when_a_state_ends() -> None:
    now = 0.0
    durations = KVDurations(lambda: now)
    pool = BlockPool(4, durations=durations)
    table = pool.allocate(2)
    pool.publish(table[0], (0, b"prefix"))
    pool.share([table[0]])
    now = 3.0
    pool.free(table)  # the first block has a second owner
    assert totals(durations.active) == (1, 3.0)
    now = 5.0
    pool.free([table[0]])  # now cached
    assert (totals(durations.active), totals(durations.cached)) == ((2, 8.0), (0, 0.0))
    now = 12.0
    pool.share([table[0]])
    assert totals(durations.cached) == (1, 7.0)
    now = 13.0
    pool.free([table[0]])
    assert totals(durations.active) == (3, 9.0)
    now = 113.0
    pool.allocate(3)  # evicts the cached block
    assert totals(durations.cached) == (2, 107.0)


def test_pool_copied_block_is_active_until_release() -> None:
    now = 0.0
    durations = KVDurations(lambda: now)
    pool = BlockPool(4, durations=durations)
    pool.allocate(1)
    pool.hold(1)
    now = 1.0
    pool.free([1])
    assert totals(durations.active) == (0, 0.0)
    now = 4.0
    pool.release_held()
    assert totals(durations.active) == (1, 4.0)
