"""The host tier: which blocks move on swaps and evictions, and which copies are avoided."""

import pytest

from engine_worker.kv.kv_cache_manager import KVCacheManager
from engine_worker.kv.preemption import HostTierConfig, OffloadedPrefixes, PreemptionMode, TransferCosts
from engine_worker.kv.sequence import Sequence
from engine_worker.kv.transfers import BlockCopy
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
    """Return a manager with 8 device blocks and 16 host blocks of 4 slots."""
    host_tier = HostTierConfig(
        num_blocks=num_host_blocks, preemption_mode=mode, costs=costs, offloaded_prefixes=offloaded
    )
    return KVCacheManager(num_blocks, 4, enable_prefix_caching=caches, host_tier=host_tier)


def run(kv_cache: KVCacheManager, token_ids: list[int]) -> Sequence:
    """Admit a sequence and compute it in one step."""
    sequence = make_sequence(token_ids)
    assert kv_cache.try_admit(sequence)
    kv_cache.publish(sequence, sequence.num_tokens)
    kv_cache.take_transfers()
    sequence.kv.num_computed_tokens = sequence.num_tokens
    return sequence


def fill(kv_cache: KVCacheManager, num_tokens: int) -> Sequence:
    """Run a sequence that shares nothing with others."""
    return run(kv_cache, make_prompt(num_tokens, first=500))


@pytest.mark.parametrize("caches", [True, False])
def test_swap_restores_all_blocks_and_token_count(caches: bool) -> None:
    kv_cache = make_manager(caches=caches)
    sequence = run(kv_cache, TOKENS[:10])
    assert kv_cache.preempt([sequence]) is SWAP
    assert (sequence.kv.tables[0].blocks, sequence.kv.tables[0].host_blocks, sequence.kv.num_computed_tokens) == (
        [],
        [1, 2, 3],
        10,
    )
    transfers = kv_cache.take_transfers()
    assert transfers.kv.swap_out == [BlockCopy(1, 1), BlockCopy(2, 2), BlockCopy(3, 3)]
    kv_cache.check_integrity([sequence])
    filler = fill(kv_cache, 32)  # overwrites every device block
    assert not kv_cache.try_swap_in([sequence])
    kv_cache.free(filler)
    kv_cache.take_transfers()
    assert kv_cache.try_swap_in([sequence])
    assert kv_cache.is_arriving(sequence)
    copies = kv_cache.take_transfers().kv.swap_in
    assert [copy.source_block_id for copy in copies] == [1, 2, 3]
    assert [copy.target_block_id for copy in copies] == sequence.kv.tables[0].blocks
    assert (sequence.kv.tables[0].host_blocks, sequence.kv.num_computed_tokens) == ([], 10)
    assert not kv_cache.is_arriving(sequence)  # from the next step on
    kv_cache.check_integrity([sequence])


def test_swap_in_skips_blocks_still_on_device() -> None:
    kv_cache = make_manager()
    sequence = run(kv_cache, TOKENS[:10])
    kv_cache.preempt([sequence])
    kv_cache.take_transfers()
    assert kv_cache.try_swap_in([sequence])
    assert sequence.kv.tables[0].blocks[:2] == [1, 2]
    (copy,) = kv_cache.take_transfers().kv.swap_in  # a partly filled block has no hash to be found by
    assert copy == BlockCopy(3, sequence.kv.tables[0].blocks[2])
    kv_cache.check_integrity([sequence])


def test_swap_out_common_prefix_moves_once() -> None:
    kv_cache = make_manager()
    first = run(kv_cache, TOKENS[:10])
    second = run(kv_cache, [*TOKENS[:8], 1, 2])
    kv_cache.preempt([second])
    kv_cache.preempt([first])
    assert len(kv_cache.take_transfers().kv.swap_out) == 4  # two shared blocks and the last of each sequence
    assert first.kv.tables[0].host_blocks[:2] == second.kv.tables[0].host_blocks[:2]
    kv_cache.check_integrity([first, second])


def test_swap_group_sharing_partial_block_moves_together() -> None:
    kv_cache = make_manager()
    parent = run(kv_cache, TOKENS[:6])
    child = make_sequence(TOKENS[:6])
    kv_cache.fork(parent, child, parent.kv.num_computed_tokens)
    group = [parent, child]
    assert kv_cache.preempt(group) is SWAP
    assert len(kv_cache.take_transfers().kv.swap_out) == 2
    assert parent.kv.tables[0].host_blocks == child.kv.tables[0].host_blocks
    filler = fill(kv_cache, 32)
    assert not kv_cache.try_swap_in(group)
    kv_cache.free(filler)
    kv_cache.take_transfers()
    assert kv_cache.try_swap_in(group)
    assert len(kv_cache.take_transfers().kv.swap_in) == 2
    assert parent.kv.tables[0].blocks == child.kv.tables[0].blocks
    kv_cache.check_integrity(group)


def test_preempt_host_pool_full_recomputes() -> None:
    kv_cache = make_manager(num_host_blocks=4)
    first, second = run(kv_cache, TOKENS[:8]), fill(kv_cache, 8)
    assert kv_cache.preempt([first]) is SWAP
    assert kv_cache.preempt([second]) is RECOMPUTE
    assert (second.kv.tables[0].host_blocks, second.kv.num_computed_tokens, second.num_dropped_tokens) == ([], 0, 8)
    assert [event["reason"] for event in kv_cache.events.since(0)["events"]] == ["by setting", "the host pool is full"]


@pytest.mark.parametrize(("seconds_in", "mode"), [(7.9, SWAP), (8.0, RECOMPUTE)])
def test_preempt_auto_selects_the_cheaper_mode(seconds_in: float, mode: PreemptionMode) -> None:
    costs = TransferCosts(
        block_bytes=10,
        device_to_host_bytes_per_second=10.0,
        host_to_device_bytes_per_second=3 * 10 / seconds_in,
        prefill_tokens_per_second=1.0,
        fetch_seconds=100.0,  # not counted: only this sequence misses the step
    )
    kv_cache = make_manager(mode=AUTO, costs=costs)
    sequence = run(kv_cache, TOKENS[:11])  # 11 s to compute, 3 s out
    assert kv_cache.preempt([sequence]) is mode


def test_preempt_auto_shared_blocks_cost_no_recompute() -> None:
    costs = TransferCosts(
        block_bytes=1,
        device_to_host_bytes_per_second=1.0,
        host_to_device_bytes_per_second=1.0,
        prefill_tokens_per_second=1.0,
    )
    kv_cache = make_manager(mode=AUTO, costs=costs)
    run(kv_cache, TOKENS[:10])
    second = run(kv_cache, [*TOKENS[:8], 1])
    assert kv_cache.preempt([second]) is RECOMPUTE  # 1 s to compute its own token; 6 s to swap 3 blocks out and in


def test_preempt_without_computed_tokens_does_not_swap() -> None:
    kv_cache = make_manager()
    sequence = make_sequence(8)
    assert kv_cache.try_admit(sequence)
    assert kv_cache.preempt([sequence]) is RECOMPUTE


def test_evicted_prefix_moves_to_host_and_returns_on_hit() -> None:
    kv_cache = make_manager()
    first = run(kv_cache, TOKENS[:10])
    kv_cache.free(first)
    filler = make_sequence(make_prompt(32, first=500))
    assert kv_cache.try_admit(filler)
    out = kv_cache.take_transfers().kv.swap_out
    assert sorted(copy.source_block_id for copy in out) == [1, 2]  # full blocks only
    filler.kv.num_computed_tokens = 32
    kv_cache.free(filler)
    second = make_sequence(TOKENS[:12])
    assert kv_cache.try_admit(second)
    assert (second.kv.num_computed_tokens, second.num_cached_tokens) == (8, 8)
    assert kv_cache.is_arriving(second)
    third = make_sequence(TOKENS[:12])  # shares the arriving blocks and also waits for them
    assert kv_cache.try_admit(third)
    assert third.kv.tables[0].blocks[:2] == second.kv.tables[0].blocks[:2]
    assert kv_cache.is_arriving(third)
    transfers = kv_cache.take_transfers()
    assert [copy.target_block_id for copy in transfers.kv.swap_in] == second.kv.tables[0].blocks[:2]
    assert transfers.kv.copies == []  # no copy from blocks that have not arrived
    kv_cache.check_integrity([second, third])
    totals = kv_cache.events.totals
    assert (totals.fetched_blocks, totals.host_hit_tokens, totals.device_hit_tokens) == (2, 8, 8)


def num_kept(kv_cache: KVCacheManager) -> int:
    """Evict all device blocks and return the number of blocks offloaded to the host."""
    kv_cache.free(fill(kv_cache, 32))
    return kv_cache.events.totals.offloaded_blocks


def test_offload_reused_skips_prefix_used_once() -> None:
    kv_cache = make_manager(offloaded=OffloadedPrefixes.REUSED)
    kv_cache.free(run(kv_cache, TOKENS[:16]))
    assert num_kept(kv_cache) == 0


def test_offload_reused_keeps_prefix_up_to_reused_length() -> None:
    kv_cache = make_manager(offloaded=OffloadedPrefixes.REUSED)
    kv_cache.free(run(kv_cache, TOKENS[:16]))
    kv_cache.free(run(kv_cache, [*TOKENS[:8], 1, 2]))
    assert num_kept(kv_cache) == 2
    third = run(kv_cache, TOKENS[:12])  # fetches both blocks
    assert third.num_cached_tokens == 8
    kv_cache.free(third)
    assert num_kept(kv_cache) == 4  # both are counted again but are already on the host, so nothing is copied
    assert kv_cache.take_transfers().kv.swap_out == []


def test_offload_reused_keeps_blocks_of_preempted_sequence() -> None:
    kv_cache = make_manager(offloaded=OffloadedPrefixes.REUSED, mode=RECOMPUTE)
    sequence = run(kv_cache, TOKENS[:10])
    assert kv_cache.preempt([sequence]) is RECOMPUTE
    assert num_kept(kv_cache) == 2
    assert kv_cache.try_admit(sequence)
    assert sequence.kv.num_computed_tokens == 8


@pytest.mark.parametrize(("num_tokens", "hits"), [(8, 0), (12, 0), (16, 12)])
def test_fetch_only_if_faster_than_compute(num_tokens: int, hits: int) -> None:
    costs = TransferCosts(
        block_bytes=1,
        device_to_host_bytes_per_second=1.0,
        host_to_device_bytes_per_second=1.0,
        prefill_tokens_per_second=1.0,
        fetch_seconds=8.0,
    )
    kv_cache = make_manager(costs=costs)  # per block 4 s to compute and 1 s to fetch, plus 8 s per fetch
    kv_cache.free(run(kv_cache, TOKENS[:num_tokens]))
    kv_cache.free(fill(kv_cache, 32))
    kv_cache.free(run(kv_cache, make_prompt(32, first=700)))
    sequence = make_sequence(TOKENS[:num_tokens])
    assert kv_cache.try_admit(sequence)
    assert sequence.kv.num_computed_tokens == hits


def test_swap_evicts_host_prefixes_but_not_vice_versa() -> None:
    kv_cache = make_manager(num_host_blocks=5)  # 4 usable host blocks
    kv_cache.free(run(kv_cache, TOKENS[:16]))
    other = fill(kv_cache, 32)  # offloads 4 prefix blocks
    assert kv_cache.stats([other]).num_host_cached_blocks == 4
    other.kv.num_computed_tokens = 12
    kv_cache.preempt([other])
    stats = kv_cache.stats([])
    assert (stats.num_host_blocks, stats.num_host_cached_blocks, stats.num_host_free_blocks) == (4, 1, 0)
    kv_cache.take_transfers()
    assert kv_cache.events.totals.evicted_host_blocks == 3
    later = run(kv_cache, make_prompt(32, first=700))  # evicts 8 blocks; one host block is not held by a sequence
    assert (len(other.kv.tables[0].host_blocks), kv_cache.stats([]).num_host_cached_blocks) == (3, 1)
    kv_cache.check_integrity([other, later])


def test_aborted_sequence_frees_its_host_blocks() -> None:
    kv_cache = make_manager(caches=False)
    sequence = run(kv_cache, TOKENS[:10])
    kv_cache.preempt([sequence])
    kv_cache.take_transfers()
    kv_cache.free(sequence)
    kv_cache.check_integrity([])
    assert kv_cache.stats([]).num_host_free_blocks == 16


def test_fetched_host_block_is_not_overwritten_in_same_batch() -> None:
    kv_cache = make_manager(num_blocks=7, num_host_blocks=3)  # 6 usable device blocks, 2 host blocks
    kv_cache.free(run(kv_cache, TOKENS[:8]))
    kv_cache.free(fill(kv_cache, 24))  # moves the 2 blocks of TOKENS to the host; all device blocks are cached
    kv_cache.take_transfers()
    fetching, evicting = make_sequence(TOKENS[:10]), make_sequence(make_prompt(12, first=700))
    assert kv_cache.try_admit(fetching)
    assert kv_cache.try_admit(evicting)  # its evictions must not replace the fetched blocks
    transfers = kv_cache.take_transfers()
    sources = {copy.source_block_id for copy in transfers.kv.swap_in}
    assert len(sources) == 2
    assert sources.isdisjoint(copy.target_block_id for copy in transfers.kv.swap_out)
    kv_cache.check_integrity([fetching, evicting])
