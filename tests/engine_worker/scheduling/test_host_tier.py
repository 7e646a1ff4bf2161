"""Swaps and prefixes in host memory: which blocks move, which need not, and what becomes of them."""

import pytest

from engine_worker.scheduling.batch import BlockCopy
from engine_worker.scheduling.kv_cache_manager import KVCacheManager
from engine_worker.scheduling.preemption import HostTierConfig, OffloadedPrefixes, PreemptionMode, TransferCosts
from engine_worker.scheduling.sequence import Sequence
from tests.builders import make_prompt, make_sequence

TOKENS = make_prompt(24)
SWAP, RECOMPUTE, AUTO = PreemptionMode.SWAP, PreemptionMode.RECOMPUTE, PreemptionMode.AUTO


def make_manager(
    num_blocks: int = 9,
    num_host_blocks: int = 17,
    mode: PreemptionMode = SWAP,
    costs: TransferCosts | None = None,
    caches: bool = True,
    offloaded: OffloadedPrefixes = OffloadedPrefixes.ALL,
) -> KVCacheManager:
    """8 blocks of 4 slots on the device, 16 on the host."""
    host_tier = HostTierConfig(
        num_blocks=num_host_blocks, preemption_mode=mode, costs=costs, offloaded_prefixes=offloaded
    )
    return KVCacheManager(num_blocks, 4, enable_prefix_caching=caches, host_tier=host_tier)


def run(kv_cache: KVCacheManager, token_ids: list[int]) -> Sequence:
    """Admitted, and computed in one step."""
    sequence = make_sequence(token_ids)
    assert kv_cache.try_admit(sequence)
    kv_cache.publish(sequence, sequence.num_tokens)
    kv_cache.take_transfers()
    sequence.kv.num_computed_tokens = sequence.num_tokens
    return sequence


def fill(kv_cache: KVCacheManager, num_tokens: int) -> Sequence:
    """A sequence that nobody shares anything with."""
    return run(kv_cache, make_prompt(num_tokens, first=500))


@pytest.mark.parametrize("caches", [True, False])
def test_a_swapped_sequence_keeps_its_count_and_gets_all_its_blocks_back(caches: bool) -> None:
    kv_cache = make_manager(caches=caches)
    sequence = run(kv_cache, TOKENS[:10])
    assert kv_cache.preempt([sequence]) is SWAP
    assert (sequence.kv.block_table, sequence.kv.host_block_table, sequence.kv.num_computed_tokens) == (
        [],
        [1, 2, 3],
        10,
    )
    transfers = kv_cache.take_transfers()
    assert transfers.swap_out == [BlockCopy(1, 1), BlockCopy(2, 2), BlockCopy(3, 3)]
    kv_cache.check_integrity([sequence])
    filler = fill(kv_cache, 32)  # every block gets new content
    assert not kv_cache.try_swap_in([sequence])
    kv_cache.free(filler)
    kv_cache.take_transfers()
    assert kv_cache.try_swap_in([sequence])
    assert kv_cache.is_arriving(sequence)
    copies = kv_cache.take_transfers().swap_in
    assert [copy.source_block_id for copy in copies] == [1, 2, 3]
    assert [copy.target_block_id for copy in copies] == sequence.kv.block_table
    assert (sequence.kv.host_block_table, sequence.kv.num_computed_tokens) == ([], 10)
    assert not kv_cache.is_arriving(sequence)  # from the next step on
    kv_cache.check_integrity([sequence])


def test_what_is_still_on_the_device_is_not_fetched() -> None:
    kv_cache = make_manager()
    sequence = run(kv_cache, TOKENS[:10])
    kv_cache.preempt([sequence])
    kv_cache.take_transfers()
    assert kv_cache.try_swap_in([sequence])
    assert sequence.kv.block_table[:2] == [1, 2]
    (copy,) = kv_cache.take_transfers().swap_in  # the partly filled one has no hash to be found by
    assert copy == BlockCopy(3, sequence.kv.block_table[2])
    kv_cache.check_integrity([sequence])


def test_a_common_prefix_goes_out_once() -> None:
    kv_cache = make_manager()
    first = run(kv_cache, TOKENS[:10])
    second = run(kv_cache, [*TOKENS[:8], 1, 2])
    kv_cache.preempt([second])
    kv_cache.preempt([first])
    assert len(kv_cache.take_transfers().swap_out) == 4  # two shared ones, and the end of each
    assert first.kv.host_block_table[:2] == second.kv.host_block_table[:2]
    kv_cache.check_integrity([first, second])


def test_a_group_that_shares_a_partly_filled_block_moves_as_a_whole() -> None:
    kv_cache = make_manager()
    parent = run(kv_cache, TOKENS[:6])
    child = make_sequence(TOKENS[:6])
    kv_cache.fork(parent, child, parent.kv.num_computed_tokens)
    group = [parent, child]
    assert kv_cache.preempt(group) is SWAP
    assert len(kv_cache.take_transfers().swap_out) == 2
    assert parent.kv.host_block_table == child.kv.host_block_table
    filler = fill(kv_cache, 32)
    assert not kv_cache.try_swap_in(group)
    kv_cache.free(filler)
    kv_cache.take_transfers()
    assert kv_cache.try_swap_in(group)
    assert len(kv_cache.take_transfers().swap_in) == 2
    assert parent.kv.block_table == child.kv.block_table
    kv_cache.check_integrity(group)


def test_the_mode_is_recompute_when_swapped_sequences_fill_the_host() -> None:
    kv_cache = make_manager(num_host_blocks=4)
    first, second = run(kv_cache, TOKENS[:8]), fill(kv_cache, 8)
    assert kv_cache.preempt([first]) is SWAP
    assert kv_cache.preempt([second]) is RECOMPUTE
    assert (second.kv.host_block_table, second.kv.num_computed_tokens, second.num_dropped_tokens) == ([], 0, 8)
    assert [event["reason"] for event in kv_cache.events.since(0)["events"]] == ["by setting", "the host pool is full"]


@pytest.mark.parametrize(("seconds_in", "mode"), [(7.9, SWAP), (8.0, RECOMPUTE)])
def test_the_cheaper_way_is_chosen(seconds_in: float, mode: PreemptionMode) -> None:
    costs = TransferCosts(
        block_bytes=10,
        device_to_host_bytes_per_second=10.0,
        host_to_device_bytes_per_second=3 * 10 / seconds_in,
        prefill_tokens_per_second=1.0,
        fetch_seconds=100.0,  # the step that only this sequence misses does not count
    )
    kv_cache = make_manager(mode=AUTO, costs=costs)
    sequence = run(kv_cache, TOKENS[:11])  # 11 s to compute, 3 s out
    assert kv_cache.preempt([sequence]) is mode


def test_blocks_that_others_keep_on_the_device_cost_nothing_to_compute() -> None:
    costs = TransferCosts(
        block_bytes=1,
        device_to_host_bytes_per_second=1.0,
        host_to_device_bytes_per_second=1.0,
        prefill_tokens_per_second=1.0,
    )
    kv_cache = make_manager(mode=AUTO, costs=costs)
    run(kv_cache, TOKENS[:10])
    second = run(kv_cache, [*TOKENS[:8], 1])
    assert kv_cache.preempt([second]) is RECOMPUTE  # 1 s for its own token; 6 s out and in for 3 blocks


def test_nothing_computed_is_not_swapped() -> None:
    kv_cache = make_manager()
    sequence = make_sequence(8)
    assert kv_cache.try_admit(sequence)
    assert kv_cache.preempt([sequence]) is RECOMPUTE


def test_an_evicted_prefix_falls_to_the_host_and_comes_back_on_a_hit() -> None:
    kv_cache = make_manager()
    first = run(kv_cache, TOKENS[:10])
    kv_cache.free(first)
    filler = make_sequence(make_prompt(32, first=500))
    assert kv_cache.try_admit(filler)
    out = kv_cache.take_transfers().swap_out
    assert sorted(copy.source_block_id for copy in out) == [1, 2]  # the full ones; a partly filled one is not kept
    filler.kv.num_computed_tokens = 32
    kv_cache.free(filler)
    second = make_sequence(TOKENS[:12])
    assert kv_cache.try_admit(second)
    assert (second.kv.num_computed_tokens, second.num_cached_tokens) == (8, 8)
    assert kv_cache.is_arriving(second)
    third = make_sequence(TOKENS[:12])  # shares what arrives, and waits for it too
    assert kv_cache.try_admit(third)
    assert third.kv.block_table[:2] == second.kv.block_table[:2]
    assert kv_cache.is_arriving(third)
    transfers = kv_cache.take_transfers()
    assert [copy.target_block_id for copy in transfers.swap_in] == second.kv.block_table[:2]
    assert transfers.block_copies == []  # nothing is copied from blocks that have not arrived
    kv_cache.check_integrity([second, third])
    totals = kv_cache.events.totals
    assert (totals.fetched_blocks, totals.host_hit_tokens, totals.device_hit_tokens) == (2, 8, 8)


def num_kept(kv_cache: KVCacheManager) -> int:
    """Blocks that go to the host when everything on the device is evicted."""
    kv_cache.free(fill(kv_cache, 32))
    return kv_cache.events.totals.offloaded_blocks


def test_a_prefix_that_nobody_else_used_is_not_kept_on_the_host() -> None:
    kv_cache = make_manager(offloaded=OffloadedPrefixes.REUSED)
    kv_cache.free(run(kv_cache, TOKENS[:16]))
    assert num_kept(kv_cache) == 0


def test_a_prefix_that_a_second_request_used_is_kept_as_far_as_it_was_used() -> None:
    kv_cache = make_manager(offloaded=OffloadedPrefixes.REUSED)
    kv_cache.free(run(kv_cache, TOKENS[:16]))
    kv_cache.free(run(kv_cache, [*TOKENS[:8], 1, 2]))
    assert num_kept(kv_cache) == 2
    third = run(kv_cache, TOKENS[:12])  # which fetches them
    assert third.num_cached_tokens == 8
    kv_cache.free(third)
    assert num_kept(kv_cache) == 4  # again; they are on the host, and nothing is copied
    assert kv_cache.take_transfers().swap_out == []


def test_what_a_sequence_that_will_be_back_has_computed_is_kept_on_the_host() -> None:
    kv_cache = make_manager(offloaded=OffloadedPrefixes.REUSED, mode=RECOMPUTE)
    sequence = run(kv_cache, TOKENS[:10])
    assert kv_cache.preempt([sequence]) is RECOMPUTE
    assert num_kept(kv_cache) == 2
    assert kv_cache.try_admit(sequence)
    assert sequence.kv.num_computed_tokens == 8


@pytest.mark.parametrize(("num_tokens", "hits"), [(8, 0), (12, 0), (16, 12)])
def test_a_prefix_is_fetched_only_if_that_is_faster_than_computing_it(num_tokens: int, hits: int) -> None:
    costs = TransferCosts(
        block_bytes=1,
        device_to_host_bytes_per_second=1.0,
        host_to_device_bytes_per_second=1.0,
        prefill_tokens_per_second=1.0,
        fetch_seconds=8.0,
    )
    kv_cache = make_manager(costs=costs)  # 4 s a block to compute, 1 s to fetch, and 8 s in any case
    kv_cache.free(run(kv_cache, TOKENS[:num_tokens]))
    kv_cache.free(fill(kv_cache, 32))
    kv_cache.free(run(kv_cache, make_prompt(32, first=700)))
    sequence = make_sequence(TOKENS[:num_tokens])
    assert kv_cache.try_admit(sequence)
    assert sequence.kv.num_computed_tokens == hits


def test_a_swap_takes_the_place_of_prefixes_and_not_the_other_way_round() -> None:
    kv_cache = make_manager(num_host_blocks=5)  # 4 on the host
    kv_cache.free(run(kv_cache, TOKENS[:16]))
    other = fill(kv_cache, 32)  # 4 prefix blocks fall to the host
    assert kv_cache.stats([other]).num_host_cached_blocks == 4
    other.kv.num_computed_tokens = 12
    kv_cache.preempt([other])
    stats = kv_cache.stats([])
    assert (stats.num_host_blocks, stats.num_host_cached_blocks, stats.num_host_free_blocks) == (4, 1, 0)
    kv_cache.take_transfers()
    assert kv_cache.events.totals.evicted_host_blocks == 3
    later = run(kv_cache, make_prompt(32, first=700))  # evicts 8 blocks; one of the host's 4 is not a sequence's
    assert (len(other.kv.host_block_table), kv_cache.stats([]).num_host_cached_blocks) == (3, 1)
    kv_cache.check_integrity([other, later])


def test_an_aborted_sequence_gives_up_its_host_blocks() -> None:
    kv_cache = make_manager(caches=False)
    sequence = run(kv_cache, TOKENS[:10])
    kv_cache.preempt([sequence])
    kv_cache.take_transfers()
    kv_cache.free(sequence)
    kv_cache.check_integrity([])
    assert kv_cache.stats([]).num_host_free_blocks == 16


def test_a_host_block_that_a_fetch_reads_is_not_overwritten_in_the_same_batch() -> None:
    kv_cache = make_manager(num_blocks=7, num_host_blocks=3)  # 6 on the device, 2 on the host
    kv_cache.free(run(kv_cache, TOKENS[:8]))
    kv_cache.free(fill(kv_cache, 24))  # the 2 blocks of TOKENS are on the host, all on the device are cached
    kv_cache.take_transfers()
    fetching, evicting = make_sequence(TOKENS[:10]), make_sequence(make_prompt(12, first=700))
    assert kv_cache.try_admit(fetching)
    assert kv_cache.try_admit(evicting)  # what it evicts would take the place of what is fetched
    transfers = kv_cache.take_transfers()
    sources = {copy.source_block_id for copy in transfers.swap_in}
    assert len(sources) == 2
    assert sources.isdisjoint(copy.target_block_id for copy in transfers.swap_out)
    kv_cache.check_integrity([fetching, evicting])
