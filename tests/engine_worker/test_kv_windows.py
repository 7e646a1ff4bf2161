"""Sliding windows: a sequence holds exactly the blocks that its next tokens can attend to.

scheduling/test_random_schedules.py and test_kv_world.py cover random sequences of operations.
"""

import pytest

from engine_worker.kv.kv_cache_manager import KVCacheManager
from engine_worker.kv.preemption import HostTierConfig, PreemptionMode
from engine_worker.kv.sequence import Sequence
from engine_worker.kv.span import KVSpan
from tests.builders import (
    FakeModelRunner,
    Transcript,
    expected_output,
    make_engine,
    make_prompt,
    make_request,
    make_sequence,
)


@pytest.mark.parametrize(
    ("window", "num_blocks"),
    [(512, 33), (511, 33), (513, 33), (514, 34), (1, 1), (2, 2), (17, 2), (18, 3), (4096, 257), (5000, 257), (0, 257)],
)
def test_window_sequence_of_4k_tokens_holds_exact_blocks(window: int, num_blocks: int) -> None:
    """A decoding sequence holds ceil((window - 1) / 16) + 1 blocks; without a window, all 257 of 4,097 tokens."""
    engine = make_engine(
        FakeModelRunner(num_blocks=400, block_size=16, windows=(window,)),
        num_blocks=400,
        block_size=16,
        windows=(window,),
        max_num_batched_tokens=256,
        max_model_len=5000,
    )
    request = make_request(make_prompt(4000), max_tokens=99, ignore_eos=True)
    engine.add_request(request)
    transcript, held = Transcript(), []
    while engine.has_work:
        transcript.add(engine.step())
        engine.check_integrity()
        held.append(engine.stats().kv_cache.num_active_blocks)
    assert transcript.tokens[request.request_id] == expected_output(request, max_num_tokens=5000, window=window)
    decoding = held[-60:-1]
    assert max(decoding) == num_blocks
    if 0 < window <= 4000:
        assert set(decoding) == {num_blocks}
    span = KVSpan(16, window, 256)
    assert max(held) <= span.max_blocks(4099) <= num_blocks + (16 if window else 0)
    assert held[-1] == 0


def test_window_sequence_may_exceed_the_pool() -> None:
    """20 blocks of 4 hold 80 tokens. A window of 16 takes 5 of them, so 1,000 tokens fit in turn."""
    engine = make_engine(
        FakeModelRunner(num_blocks=21, block_size=4, windows=(16,)),
        num_blocks=21,
        block_size=4,
        windows=(16,),
        max_model_len=1000,
        max_num_batched_tokens=16,
    )
    request = make_request(make_prompt(700), max_tokens=300, ignore_eos=True)
    engine.add_request(request)
    transcript = Transcript()
    while engine.has_work:
        transcript.add(engine.step())
        engine.check_integrity()
        assert engine.stats().kv_cache.num_active_blocks <= KVSpan(4, 16, 16).max_blocks(1000) == 9
    assert transcript.tokens[request.request_id] == expected_output(request, max_num_tokens=1000, window=16)
    assert len(transcript.tokens[request.request_id]) == 300


def computed(kv_cache: KVCacheManager, num_tokens: int, request_id: str = "a") -> Sequence:
    """Return an admitted sequence that was computed in steps of 8 tokens."""
    sequence = make_sequence(make_prompt(num_tokens), request_id)
    assert kv_cache.try_admit(sequence)
    while sequence.num_uncomputed_tokens:
        kv_cache.allocate(sequence)
        end = sequence.kv.num_computed_tokens + min(8, sequence.num_uncomputed_tokens)
        kv_cache.publish(sequence, end)
        sequence.kv.num_computed_tokens = end
        kv_cache.take_transfers()
        kv_cache.release_outside_window()
    return sequence


def test_window_prefix_hit_needs_only_last_window() -> None:
    kv_cache = KVCacheManager(num_blocks=30, block_size=4, windows=(8,), max_new_tokens=8)
    first = computed(kv_cache, 40)
    assert (first.kv.tables[0].blocks[:8], len(first.kv.blocks)) == ([0] * 8, 2)  # token 40 attends from token 33 on
    last = list(first.kv.blocks)
    kv_cache.free(first)
    # Cached blocks are evicted in LRU order: all except those of the last window.
    taken = kv_cache.device_pool.allocate(kv_cache.num_available_blocks - 4)
    second = make_sequence(make_prompt(41), "b")
    kv_cache.device_pool.free(taken[:10])
    assert kv_cache.try_admit(second)
    assert (second.kv.num_computed_tokens, second.kv.tables[0].blocks[:8], second.kv.blocks[:2]) == (40, [0] * 8, last)
    kv_cache.take_transfers()
    kv_cache.device_pool.free(taken[10:])
    kv_cache.check_integrity([second])


@pytest.mark.parametrize("caches", [False, True])
def test_window_swap_moves_only_the_window(caches: bool) -> None:
    host_tier = HostTierConfig(num_blocks=9, preemption_mode=PreemptionMode.SWAP)
    kv_cache = KVCacheManager(30, 4, windows=(8,), max_new_tokens=8, enable_prefix_caching=caches, host_tier=host_tier)
    sequence = computed(kv_cache, 42)
    assert kv_cache.preempt([sequence]) is PreemptionMode.SWAP
    moves = kv_cache.take_transfers().kv
    assert (len(moves.swap_out), len(sequence.kv.tables[0].host_blocks), len(sequence.kv.host_blocks)) == (3, 11, 3)
    kv_cache.check_integrity([sequence])
    taken = kv_cache.device_pool.allocate(kv_cache.num_available_blocks)  # evicts all cached blocks
    kv_cache.device_pool.free(taken)
    assert kv_cache.try_swap_in([sequence])
    assert len(kv_cache.take_transfers().kv.swap_in) == 3
    assert sequence.kv.tables[0].blocks[:8] == [0] * 8 and 0 not in sequence.kv.blocks
    kv_cache.check_integrity([sequence])
    kv_cache.free(sequence)
    assert kv_cache.stats([]).num_active_blocks == 0


def test_window_forking_prompt_is_computed_at_its_end() -> None:
    """Its sequences start after the prompt and attend to tokens that a hit inside an output may lack."""
    kv_cache = KVCacheManager(num_blocks=60, block_size=4, windows=(8,), max_new_tokens=8)
    tokens = computed(kv_cache, 40)
    kv_cache.free(tokens)
    prompt, output = tokens.prompt_token_ids[:21], tokens.prompt_token_ids[21:]
    first, other = (make_sequence(prompt, "b", output_token_ids=output, n=n) for n in (2, 1))
    assert kv_cache.try_admit(other) and kv_cache.try_admit(first)
    assert (other.kv.num_computed_tokens, first.kv.num_computed_tokens) == (39, 20)
    child = make_sequence(prompt, "b", output_token_ids=output[:3], n=2)
    first.kv.num_computed_tokens = 28
    kv_cache.publish(first, 28)
    kv_cache.fork(first, child, 21)
    assert child.kv.blocks[:2] == first.kv.blocks[:2] and child.kv.tables[0].num_released == 3
    kv_cache.take_transfers()
    kv_cache.release_outside_window()
    assert (first.kv.tables[0].num_released, child.kv.tables[0].num_released) == (5, 3)
    kv_cache.check_integrity([first, other, child])


@pytest.mark.parametrize("window", [0, 1, 3, 8, 9, 100])
@pytest.mark.parametrize("lost", [set(), {0}, {3}, {7}, {9}, {1, 6}])
def test_window_longest_hit_equals_exhaustive_search(window: int, lost: set[int]) -> None:
    span, asked = KVSpan(4, window, 8), list[int]()

    def find(index: int) -> int | None:
        asked.append(index)
        return None if index in lost else 100 + index

    for start in range(3) if window else [0]:
        asked.clear()
        ends = [end for end in range(start + 1, 11) if not lost & set(range(span.first_block(end * 4), end))]
        first, block_ids = span.longest_hit(range(10), find, start)
        end = max(ends, default=start)
        assert (first, block_ids) == (first, [100 + index for index in range(first, end)])
        assert first == (span.first_block(end * 4) if ends else start)
        assert len(asked) == len(set(asked))
