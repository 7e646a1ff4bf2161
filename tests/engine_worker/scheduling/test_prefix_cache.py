"""Prefix cache hits of a new sequence: full blocks to share, tokens to copy, and nothing of other tenants."""

from collections.abc import Iterable
from typing import Any, cast

import pytest

from engine_worker.kv.kv_cache_manager import KVCacheManager
from engine_worker.kv.preemption import HostTierConfig
from engine_worker.kv.prefix_cache import cache_root
from engine_worker.kv.sequence import Sequence
from engine_worker.kv.transfers import BlockCopy
from shared.messages import FinishEvent
from tests.builders import (
    FakeModelRunner,
    expected_output,
    make_engine,
    make_prompt,
    make_request,
    make_sequence,
    run_to_end,
)

TOKENS = make_prompt(24)


def make_manager(num_blocks: int = 17, **options: Any) -> KVCacheManager:
    return KVCacheManager(num_blocks=num_blocks, block_size=4, **options)


def admit(
    kv_cache: KVCacheManager, token_ids: list[int], *, root: bytes = b"", output_token_ids: Iterable[int] = ()
) -> Sequence:
    """Admit a sequence and compute it in one step; `num_cached_tokens` is the hit."""
    sequence = make_sequence(token_ids, output_token_ids=output_token_ids)
    sequence.kv.cache_root = root
    assert kv_cache.try_admit(sequence)
    kv_cache.publish(sequence, sequence.num_tokens)
    return sequence


def finish_step(kv_cache: KVCacheManager, *sequences: Sequence) -> list[BlockCopy]:
    for sequence in sequences:
        sequence.kv.num_computed_tokens = sequence.num_tokens
    return kv_cache.take_transfers().kv.copies


def test_prefix_hit_shares_full_blocks_of_running_and_ended() -> None:
    kv_cache = make_manager()
    first = admit(kv_cache, TOKENS[:10])
    finish_step(kv_cache, first)
    second = admit(kv_cache, [*TOKENS[:8], 1, 2])
    assert (second.num_cached_tokens, second.kv.num_computed_tokens, second.kv.tables[0].blocks) == (8, 8, [1, 2, 4])
    finish_step(kv_cache, second)
    kv_cache.check_integrity([first, second])
    kv_cache.free(first)
    kv_cache.free(second)
    third = admit(kv_cache, [*TOKENS[:8], 3])
    assert (third.num_cached_tokens, third.kv.tables[0].blocks[:2]) == (8, [1, 2])


def test_prefix_hit_in_same_step_shares_planned_blocks() -> None:
    kv_cache = make_manager()
    first = admit(kv_cache, TOKENS[:10])
    second = admit(kv_cache, TOKENS[:10])
    assert (second.num_cached_tokens, second.kv.tables[0].blocks[:2]) == (8, first.kv.tables[0].blocks[:2])
    assert finish_step(kv_cache, first, second) == []  # no copy, because its source is written after the copies


@pytest.mark.parametrize(("num_equal", "num_cached"), [(23, 16 + 7), (20, 20), (18, 18), (16, 16), (15, 15), (3, 3)])
def test_prefix_hit_copies_tokens_after_last_full_block(num_equal: int, num_cached: int) -> None:
    kv_cache = make_manager()
    first = admit(kv_cache, TOKENS)
    finish_step(kv_cache, first)
    second = admit(kv_cache, [*TOKENS[:num_equal], 1])
    assert second.num_cached_tokens == second.kv.num_computed_tokens == num_cached
    copies = finish_step(kv_cache, second)
    index, rest = divmod(num_cached, 4)
    assert copies == ([BlockCopy(first.kv.tables[0].blocks[index], second.kv.tables[0].blocks[index])] if rest else [])
    assert second.kv.tables[0].blocks[:index] == first.kv.tables[0].blocks[:index]
    assert second.kv.tables[0].blocks[index] != first.kv.tables[0].blocks[index]
    kv_cache.check_integrity([first, second])


@pytest.mark.parametrize("num_tokens", [1, 2, 4, 5, 8, 9])
def test_prefix_hit_never_covers_last_token(num_tokens: int) -> None:
    kv_cache = make_manager()
    for expected in (0, num_tokens - 1, num_tokens - 1):
        sequence = admit(kv_cache, TOKENS[:num_tokens])
        assert sequence.num_cached_tokens == expected
        finish_step(kv_cache, sequence)
        kv_cache.free(sequence)


def test_prefix_hit_includes_output_and_partial_block() -> None:
    kv_cache = make_manager()
    turn = admit(kv_cache, TOKENS[:6], output_token_ids=TOKENS[6:11])
    finish_step(kv_cache, turn)
    turn.output_token_ids.append(TOKENS[11])  # sampled last and never computed
    kv_cache.free(turn)
    following = admit(kv_cache, TOKENS[:16])
    assert following.num_cached_tokens == 11
    assert finish_step(kv_cache, following) == [BlockCopy(3, following.kv.tables[0].blocks[2])]


def test_prefix_cache_token_in_flight_is_not_published() -> None:
    kv_cache = make_manager()
    sequence = admit(kv_cache, TOKENS[:7])
    finish_step(kv_cache, sequence)
    sequence.kv.num_computed_tokens = 8  # the next step computes a token whose id is still unknown
    kv_cache.publish(sequence, 8)
    assert sequence.kv.num_published_blocks == 1
    sequence.output_token_ids.append(TOKENS[7])
    kv_cache.publish(sequence, 9)
    assert sequence.kv.num_published_blocks == 2


def test_prefix_hit_other_tenant_or_salt_finds_nothing() -> None:
    kv_cache = make_manager()
    finish_step(kv_cache, admit(kv_cache, TOKENS, root=cache_root("a", "")))
    for root in (cache_root("b", ""), cache_root("a", "salt"), cache_root("", "")):
        assert admit(kv_cache, TOKENS[:9], root=root).num_cached_tokens == 0
    assert admit(kv_cache, TOKENS[:9], root=cache_root("a", "")).num_cached_tokens == 8


def test_prefix_cache_evicts_leaves_before_prefix() -> None:
    kv_cache = make_manager(num_blocks=7)
    first = admit(kv_cache, TOKENS[:16])
    finish_step(kv_cache, first)
    kv_cache.free(first)
    other = admit(kv_cache, make_prompt(16, first=500))  # 4 blocks: 2 free ones and the last two of `first`
    finish_step(kv_cache, other)
    kv_cache.free(other)
    assert admit(kv_cache, TOKENS[:16]).num_cached_tokens == 8


def test_prefix_cache_evicted_block_is_not_copied() -> None:
    kv_cache = make_manager(num_blocks=4)
    first = admit(kv_cache, TOKENS[:6])
    finish_step(kv_cache, first)
    kv_cache.free(first)
    other = admit(kv_cache, make_prompt(12, first=500))
    finish_step(kv_cache, other)
    kv_cache.free(other)
    again = admit(kv_cache, TOKENS[:6])
    assert (again.num_cached_tokens, finish_step(kv_cache, again)) == (0, [])
    kv_cache.check_integrity([again])


def test_cached_blocks_are_available_and_counted_once() -> None:
    kv_cache = make_manager(num_blocks=5)  # 4 usable blocks
    first = admit(kv_cache, TOKENS[:8])
    finish_step(kv_cache, first)
    kv_cache.free(first)
    assert kv_cache.num_available_blocks == 4
    too_long = make_sequence(TOKENS[:17])
    assert not kv_cache.try_admit(too_long)
    assert (too_long.kv.tables[0].blocks, too_long.kv.num_computed_tokens) == ([], 0)
    assert not kv_cache.try_admit(make_sequence(TOKENS[:16]), headroom_blocks=1)
    assert kv_cache.try_admit(make_sequence(TOKENS[:16]))


def test_prefix_hit_copy_is_skipped_if_source_is_needed() -> None:
    kv_cache = make_manager(num_blocks=4)  # 3 usable blocks
    first = admit(kv_cache, TOKENS[:12])
    finish_step(kv_cache, first)
    kv_cache.free(first)
    second = admit(kv_cache, [*TOKENS[:10], 1, 2])  # 2 shared and 1 new block, which is the copy's source
    assert (second.num_cached_tokens, finish_step(kv_cache, second)) == (8, [])
    kv_cache.check_integrity([second])


def test_fork_with_other_token_does_not_inherit_hash() -> None:
    kv_cache = make_manager()
    parent = admit(kv_cache, TOKENS[:7])
    finish_step(kv_cache, parent)
    parent.output_token_ids.append(TOKENS[7])
    child = make_sequence(TOKENS[:7], output_token_ids=[1])
    kv_cache.publish(parent, 8)  # block 1 of the parent now contains the parent's own token
    kv_cache.fork(parent, child, parent.kv.num_computed_tokens)
    assert (child.kv.num_published_blocks, child.kv.digests) == (1, parent.kv.digests[:1])
    kv_cache.allocate(child)
    kv_cache.publish(child, 8)
    assert child.kv.digests[1] != parent.kv.digests[1]


def test_prefix_caching_disabled_finds_nothing() -> None:
    kv_cache = make_manager(enable_prefix_caching=False)
    first = admit(kv_cache, TOKENS)
    finish_step(kv_cache, first)
    kv_cache.free(first)
    assert (admit(kv_cache, TOKENS).num_cached_tokens, kv_cache.stats([]).num_cached_blocks) == (0, 0)


@pytest.mark.parametrize("max_num_batched_tokens", [512, 2048])
def test_500_requests_compute_their_common_prefix_once(max_num_batched_tokens: int) -> None:
    prefix = make_prompt(1024)
    runner = FakeModelRunner(num_blocks=2049, block_size=16)
    engine = make_engine(
        runner,
        num_blocks=2049,
        block_size=16,
        max_num_seqs=64,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=2048,
    )
    requests = [make_request([*prefix, 3 + number, 7], f"r{number}", max_tokens=3) for number in range(500)]
    for request in requests:
        engine.add_request(request)
    transcript = run_to_end(engine)
    cached = []
    for request in requests:
        assert transcript.tokens[request.request_id] == expected_output(request, max_num_tokens=2048)
        end = transcript.ends[request.request_id]
        assert isinstance(end, FinishEvent)
        cached.append(end.usage.cached_tokens)
    assert cached == [0] + [1024] * 499
    assert runner.num_computed_tokens == 1024 + sum(2 + len(tokens) - 1 for tokens in transcript.tokens.values())


@pytest.mark.parametrize("host_blocks", [0, 20])
def test_failed_request_leaves_nothing_in_prefix_cache(host_blocks: int) -> None:
    runner = FakeModelRunner()
    host_tier = HostTierConfig(num_blocks=host_blocks) if host_blocks else None
    engine = make_engine(runner, host_tier=host_tier)
    for name, failure in (("a", None), ("b", "not a number"), ("c", None)):
        if failure:
            runner.failures[name] = failure
        engine.add_request(make_request(TOKENS[:8], name, max_tokens=6, ignore_eos=True))
        end = run_to_end(engine).ends[name]
        if not failure:
            assert cast(FinishEvent, end).usage.cached_tokens == 0  # c: b used the blocks that a had published


def test_cached_tokens_in_usage_count_only_first_admission() -> None:
    engine = make_engine(num_blocks=9, block_size=4)
    for name in ("a", "b"):
        engine.add_request(make_request(TOKENS[:8], name, max_tokens=12, ignore_eos=True))
    ends = run_to_end(engine).ends
    assert engine.stats().counters.preemptions["recompute"] > 0
    assert [cast(FinishEvent, ends[name]).usage.cached_tokens for name in ("a", "b")] == [0, 4]
