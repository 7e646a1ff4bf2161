"""Block tables: the number of blocks of a sequence after each change, forks, and cache statistics."""

import pytest

from engine_worker.kv.kv_cache_manager import KVCacheManager
from engine_worker.kv.sequence import Sequence
from engine_worker.kv.transfers import BlockCopy
from tests.builders import make_sequence


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(1, 1), (7, 1), (8, 1), (9, 2), (16, 2), (17, 3)])
def test_allocate_gives_blocks_for_all_tokens(num_tokens: int, num_blocks: int) -> None:
    kv_cache = KVCacheManager(num_blocks=9, block_size=8)
    sequence = make_sequence(num_tokens)
    kv_cache.allocate(sequence)
    assert sequence.kv.tables[0].blocks == list(range(1, num_blocks + 1))


def test_allocate_adds_block_only_at_block_edge() -> None:
    kv_cache = KVCacheManager(num_blocks=9, block_size=4)
    sequence = make_sequence(3)
    lengths = []
    for token_id in range(7):
        kv_cache.allocate(sequence)
        lengths.append(len(sequence.kv.tables[0].blocks))
        sequence.output_token_ids.append(token_id)
    assert lengths == [1, 1, 2, 2, 2, 2, 3]  # 3, 4 | 5, 6, 7, 8 | 9 tokens


def test_can_allocate_counts_missing_blocks() -> None:
    kv_cache = KVCacheManager(num_blocks=5, block_size=4)
    sequence = make_sequence(12)
    assert kv_cache.can_allocate(sequence)
    assert not kv_cache.can_allocate(sequence, make_sequence(5))
    kv_cache.allocate(sequence)
    assert kv_cache.can_allocate(sequence, make_sequence(4))  # `sequence` has its blocks; one is left
    assert not kv_cache.can_allocate(make_sequence(5))


def test_freed_blocks_are_reused_in_order() -> None:
    kv_cache = KVCacheManager(num_blocks=9, block_size=4)
    first, second = make_sequence(12), make_sequence(12)
    kv_cache.allocate(first)
    table = list(first.kv.tables[0].blocks)
    kv_cache.free(first)
    assert first.kv.tables[0].blocks == []
    kv_cache.allocate(second)
    assert second.kv.tables[0].blocks == table == [1, 2, 3]
    kv_cache.check_integrity([second])


def test_kv_stats_of_two_sequences() -> None:
    kv_cache = KVCacheManager(num_blocks=9, block_size=4)
    first, second = make_sequence(6), make_sequence(4)
    for sequence in (first, second):
        kv_cache.allocate(sequence)
    first.kv.num_computed_tokens, second.kv.num_computed_tokens = 5, 4
    stats = kv_cache.stats([first, second])
    assert (stats.num_blocks, stats.num_free_blocks, stats.num_cached_blocks, stats.num_active_blocks) == (8, 5, 0, 3)
    assert (stats.block_size, stats.num_blocks, stats.num_wasted_slots) == (4, 8, 3)
    assert stats.usage_ratio == 3 / 8
    assert stats.sharing_ratio == 0.0


def forked(kv_cache: KVCacheManager, parent: Sequence, *output_token_ids: int) -> Sequence:
    child = make_sequence(parent.prompt_token_ids, output_token_ids=[*parent.output_token_ids, *output_token_ids])
    kv_cache.fork(parent, child, parent.kv.num_computed_tokens)
    return child


def computed(kv_cache: KVCacheManager, num_tokens: int) -> Sequence:
    sequence = make_sequence(num_tokens)
    kv_cache.allocate(sequence)
    sequence.kv.num_computed_tokens = num_tokens
    return sequence


def test_fork_shares_blocks_and_first_writer_copies_last() -> None:
    kv_cache = KVCacheManager(num_blocks=9, block_size=4)
    parent = computed(kv_cache, 6)
    first, second = forked(kv_cache, parent, 11), forked(kv_cache, parent, 12)
    kv_cache.free(parent)
    assert first.kv.tables[0].blocks == second.kv.tables[0].blocks == [1, 2]
    assert (first.kv.num_computed_tokens, kv_cache.tables.missing(first)) == (6, 1)
    kv_cache.allocate(first)
    kv_cache.allocate(second)  # the only owner of its block now: no copy
    assert (first.kv.tables[0].blocks, second.kv.tables[0].blocks) == ([1, 3], [1, 2])
    assert kv_cache.take_transfers().kv.copies == [BlockCopy(2, 3)]
    assert kv_cache.take_transfers().kv.copies == []
    kv_cache.check_integrity([first, second])


def test_fork_of_a_block_that_is_being_copied_copies_its_source() -> None:
    """The copies of one step run in any order, so none may read what another one writes."""
    kv_cache = KVCacheManager(num_blocks=9, block_size=4)
    parent = computed(kv_cache, 6)
    first = forked(kv_cache, parent, 11)
    parent.output_token_ids.append(10)
    kv_cache.allocate(parent)
    second = forked(kv_cache, parent, 12)
    kv_cache.free(first)
    kv_cache.allocate(second)
    assert (parent.kv.tables[0].blocks, second.kv.tables[0].blocks) == ([1, 3], [1, 4])
    assert kv_cache.take_transfers().kv.copies == [BlockCopy(2, 3), BlockCopy(2, 4)]
    kv_cache.check_integrity([parent, second])


def test_fork_at_block_edge_needs_no_copy() -> None:
    kv_cache = KVCacheManager(num_blocks=9, block_size=4)
    parent = computed(kv_cache, 8)
    children = [forked(kv_cache, parent, token_id) for token_id in (11, 12)]
    for child in children:
        assert kv_cache.tables.missing(child) == 1
        kv_cache.allocate(child)
    assert [child.kv.tables[0].blocks for child in children] == [[1, 2, 3], [1, 2, 4]]
    assert kv_cache.take_transfers().kv.copies == []
    kv_cache.check_integrity([parent, *children])


def test_copy_source_is_not_allocated_in_same_step() -> None:
    kv_cache = KVCacheManager(num_blocks=6, block_size=4)
    parent = computed(kv_cache, 6)
    child = forked(kv_cache, parent, 11)
    kv_cache.allocate(child)
    kv_cache.free(parent)  # preempted after the copy was planned: block 2 is free but will still be read
    other = make_sequence(8)
    kv_cache.allocate(other)
    assert other.kv.tables[0].blocks == [4, 5]
    assert not kv_cache.can_allocate(make_sequence(1))
    assert kv_cache.take_transfers().kv.copies == [BlockCopy(2, 3)]
    assert kv_cache.can_allocate(make_sequence(4))
    kv_cache.check_integrity([child, other])


def test_shared_block_without_tokens_is_replaced_not_copied() -> None:
    kv_cache = KVCacheManager(num_blocks=9, block_size=4)
    parent = computed(kv_cache, 6)
    child = make_sequence(parent.prompt_token_ids)
    kv_cache.fork(parent, child, parent.kv.num_computed_tokens)
    parent.kv.num_computed_tokens = child.kv.num_computed_tokens = 4
    kv_cache.allocate(child)
    assert (child.kv.tables[0].blocks, kv_cache.take_transfers().kv.copies) == ([1, 3], [])


def test_sharing_ratio_counts_entries_without_own_block() -> None:
    kv_cache = KVCacheManager(num_blocks=9, block_size=4)
    parent = computed(kv_cache, 8)
    fork = forked(kv_cache, parent)
    kv_cache.check_integrity([parent, fork])
    assert kv_cache.stats([parent, fork]).sharing_ratio == 0.5


def test_kv_stats_of_empty_cache_are_zero() -> None:
    stats = KVCacheManager(num_blocks=9, block_size=4).stats([])
    assert (stats.usage_ratio, stats.sharing_ratio, stats.num_wasted_slots) == (0.0, 0.0, 0)


def test_kv_integrity_detects_computed_tokens_beyond_blocks() -> None:
    kv_cache = KVCacheManager(num_blocks=9, block_size=4)
    sequence = make_sequence(8)
    kv_cache.allocate(sequence)
    sequence.kv.num_computed_tokens = 9
    with pytest.raises(AssertionError, match="outside its blocks"):
        kv_cache.check_integrity([sequence])


def test_block_size_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="block_size is 0"):
        KVCacheManager(num_blocks=4, block_size=0)
