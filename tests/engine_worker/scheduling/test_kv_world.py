"""Random orders of admissions, forks, steps, preemptions, and ends: counts balance and contents are correct.

Hypothesis searches for short counterexamples, and a seeded driver runs 10^5 operations. Mutations prove that the checks
detect a missing release, a missing copy, or a hash that covers too little.
"""

from collections.abc import Callable, Iterable
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from engine_worker.kv import prefix_cache
from engine_worker.kv.block_pool import BlockPool
from engine_worker.kv.host_tier import HostTier
from engine_worker.kv.kv_cache_manager import KVCacheManager
from engine_worker.kv.prefix_cache import PrefixCache
from engine_worker.kv.sequence import Sequence
from engine_worker.kv.transfers import Moves, Transfers
from tests.engine_worker.scheduling.kv_world import KVWorld, Newcomer
from tests.engine_worker.scheduling.test_random_schedules import random_windows

NUM_SEEDS, NUM_OPERATIONS = 20, 5_000
TOKEN_IDS = (3, 4)  # few ids, so that prefixes often agree up to any position
prompts = st.lists(st.sampled_from(TOKEN_IDS), min_size=1, max_size=20)


class KVMachine(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(3, 24),
        num_host_blocks=st.sampled_from([0, 3, 24]),
        block_size=st.sampled_from([1, 2, 4]),
        cached=st.booleans(),
        windows=st.sampled_from([(0,), (0,), (1,), (2,), (5,), (9,), (0, 5), (3, 0, 9), (2, 7)]),
    )
    def build(
        self, num_blocks: int, num_host_blocks: int, block_size: int, cached: bool, windows: tuple[int, ...]
    ) -> None:
        self.world = KVWorld(
            num_blocks, block_size, enable_prefix_caching=cached, num_host_blocks=num_host_blocks, windows=windows
        )

    def pick(self, data: st.DataObject) -> Sequence | None:
        running = self.world.running
        return running[data.draw(st.integers(0, len(running) - 1))] if running else None

    @rule(prompt=prompts)
    def admit(self, prompt: list[int]) -> None:
        self.world.compute([], [Newcomer(prompt)])

    @rule(data=st.data(), num_dropped=st.sampled_from([0, 0, 1, 5, 20]))
    def fork(self, data: st.DataObject, num_dropped: int) -> None:
        if (sequence := self.pick(data)) is not None:
            self.world.fork(sequence, num_dropped)

    @rule(data=st.data(), again=st.booleans())
    def leave(self, data: st.DataObject, again: bool) -> None:
        if (sequence := self.pick(data)) is not None:
            self.world.leave(sequence)
            if again:
                self.world.compute([], [Newcomer(sequence.prompt_token_ids, sequence.output_token_ids)])

    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        if (sequence := self.pick(data)) is not None:
            self.world.preempt(sequence)

    @rule(number=st.integers(1, 3))
    def swap_in(self, number: int) -> None:
        self.world.swap_in(self.world.swapped[:number])

    @rule(data=st.data(), token_id=st.sampled_from(TOKEN_IDS))
    def append(self, data: st.DataObject, token_id: int) -> None:
        sequence = self.pick(data)
        if sequence is not None and sequence.num_uncomputed_tokens == 0:
            sequence.output_token_ids.append(token_id)

    @rule(data=st.data(), counts=st.lists(st.integers(1, 8), max_size=4), newcomers=st.lists(prompts, max_size=2))
    def compute(self, data: st.DataObject, counts: list[int], newcomers: list[list[int]]) -> None:
        chosen = {id(sequence): (sequence, count) for count in counts if (sequence := self.pick(data)) is not None}
        self.world.compute(chosen.values(), [Newcomer(prompt) for prompt in newcomers])

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "world"):
            self.world.check()


@pytest.mark.timeout(600)
def test_kv_world_short_histories_keep_counts_and_contents() -> None:
    slow = [HealthCheck.too_slow, HealthCheck.data_too_large]
    run_state_machine_as_test(
        KVMachine,
        settings=settings(
            max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=slow, derandomize=True
        ),
    )


@pytest.mark.timeout(600)
@pytest.mark.parametrize("cached", [True, False])
def test_kv_world_hundred_thousand_operations_break_nothing(cached: bool) -> None:
    worlds = [run_random_operations(seed, NUM_OPERATIONS // 2, cached=cached) for seed in range(NUM_SEEDS)]
    assert sum(world.num_operations for world in worlds) == NUM_SEEDS * NUM_OPERATIONS // 2  # both cases together: 10^5
    assert sum(world.num_copies for world in worlds) > 1_000, "too few copies on write for a meaningful test"
    assert (sum(world.num_cached_tokens for world in worlds) > 10_000) == cached
    assert sum(world.num_swapped_blocks for world in worlds) > 1_000, "too few swaps for a meaningful test"


@pytest.mark.timeout(600)
@pytest.mark.parametrize("cached", [True, False])
def test_kv_world_windows_break_nothing(cached: bool) -> None:
    worlds = [
        run_random_operations(seed, NUM_OPERATIONS // 8, cached=cached, windows=(1 + seed,))
        for seed in range(NUM_SEEDS)
    ]
    assert sum(world.num_copies for world in worlds) > 150, "too few copies on write for a meaningful test"
    assert (sum(world.num_cached_tokens for world in worlds) > 3_000) == cached
    assert sum(world.num_swapped_blocks for world in worlds) > 300, "too few swaps for a meaningful test"


@pytest.mark.timeout(600)
def test_kv_world_groups_break_nothing() -> None:
    """150 histories with 1 to 4 groups and windows of 0 to 64."""
    worlds = [
        run_random_operations(seed, 100, cached=seed % 8 > 0, windows=random_windows(seed)) for seed in range(150)
    ]
    assert sum(world.num_copies for world in worlds) > 400, "too few copies on write for a meaningful test"
    assert sum(world.num_cached_tokens for world in worlds) > 1_000, "too few hits for a meaningful test"
    assert sum(world.num_swapped_blocks for world in worlds) > 300, "too few swaps for a meaningful test"


def run_random_operations(
    seed: int, num_operations: int, *, cached: bool = True, windows: tuple[int, ...] = (0,)
) -> KVWorld:
    random = Random(seed)
    num_blocks, block_size, num_host_blocks = random.randrange(8, 60), random.choice([1, 2, 4, 8]), 15 * (seed % 4)
    num_blocks, num_host_blocks = num_blocks * len(windows), num_host_blocks * len(windows)
    world = KVWorld(
        num_blocks, block_size, enable_prefix_caching=cached, num_host_blocks=num_host_blocks, windows=windows
    )
    for _ in range(num_operations):
        operations = [admit, fork, leave, preempt, swap_in, append, compute]
        random.choices(operations, weights=[2, 2, 2, 1, 2, 6, 6])[0](world, random)
        world.check()
    return world


def random_prompt(random: Random) -> list[int]:
    """Return a prompt that often begins with one of three stems."""
    stem = [TOKEN_IDS[0]] * random.choice([0, 7, 16])
    return [*stem, *random.choices(TOKEN_IDS, k=random.randint(1, 12))]


def admit(world: KVWorld, random: Random) -> None:
    world.compute([], [Newcomer(random_prompt(random), num_tokens=random.choice([1, 5, 100]))])


def fork(world: KVWorld, random: Random) -> None:
    if world.running and len(world.running) < 12:
        world.fork(random.choice(world.running), random.choice([0, 0, 0, 0, 0, 1, 5]))


def leave(world: KVWorld, random: Random) -> None:
    if world.running:
        sequence = random.choice(world.running)
        world.leave(sequence)
        if random.random() < 0.5:  # preempted, and admitted again
            world.compute([], [Newcomer(sequence.prompt_token_ids, sequence.output_token_ids)])


def preempt(world: KVWorld, random: Random) -> None:
    if world.running:
        world.preempt(random.choice(world.running))


def swap_in(world: KVWorld, random: Random) -> None:
    world.swap_in(world.swapped[: random.choice([1, 2])])
    if world.swapped and random.random() < 0.1:
        world.leave(random.choice(world.swapped))


def append(world: KVWorld, random: Random) -> None:
    for sequence in world.running:
        if sequence.num_uncomputed_tokens == 0 and random.random() < 0.7:
            sequence.output_token_ids.append(random.choice(TOKEN_IDS))


def compute(world: KVWorld, random: Random) -> None:
    chosen = [(sequence, random.choice([1, 3, 100])) for sequence in world.running if random.random() < 0.7]
    world.compute(chosen, [Newcomer(random_prompt(random)) for _ in range(random.choice([0, 0, 1, 2]))])


def nth(number: int, right: Callable[..., Any], wrong: Callable[..., Any]) -> Callable[..., Any]:
    """Return `right` with call `number` replaced by `wrong`. Only effective calls count; 0 replaces all calls."""
    calls = 0

    def function(owner: Any, *arguments: Any) -> Any:
        nonlocal calls
        arguments = tuple(list(items) if isinstance(items, Iterable) else items for items in arguments)
        calls += has_effect(owner, *arguments)
        return wrong(right, owner, *arguments) if number in {0, calls} else right(owner, *arguments)

    return function


def has_effect(owner: Any, *arguments: Any) -> bool:
    if isinstance(owner, KVCacheManager) and arguments:  # publish(sequence, num_computed_tokens)
        sequence, num_computed_tokens = arguments
        return bool(num_computed_tokens // owner.block_size > sequence.kv.num_published_blocks)
    if isinstance(owner, HostTier):
        return bool(owner._planned.swap_out and owner._planned.swap_in)
    return bool(arguments[0]) if arguments else bool(owner.tables.copies)


def without_one_block(right: Callable[..., Any], pool: BlockPool, block_ids: list[int]) -> None:
    right(pool, block_ids[1:])


def without_one_copy(right: Callable[..., Any], manager: KVCacheManager) -> Transfers:
    transfers: Transfers = right(manager)
    del transfers.kv.copies[:1]
    return transfers


def without_one_store(right: Callable[..., Any], host: HostTier) -> Moves:
    moves: Moves = right(host)
    del moves.swap_out[:1]
    return moves


def without_one_fetch(right: Callable[..., Any], host: HostTier) -> Moves:
    moves: Moves = right(host)
    del moves.swap_in[:1]
    return moves


def not_at_all(right: Callable[..., Any], owner: Any, *arguments: Any) -> bool:
    del right, owner, arguments
    return False


def forgets_nothing(right: Callable[..., Any], cache: PrefixCache, block_id: int) -> tuple[bool, bool]:
    del right, cache, block_id
    return False, False


ONE = (1, 30)  # one effective call
ALL = (0,)  # a single wrong call may be harmless
MUTATIONS: dict[str, tuple[type, str, Callable[..., Any], tuple[int, ...]]] = {
    "reference_not_released": (BlockPool, "free", without_one_block, ONE),
    "reference_not_counted": (BlockPool, "share", without_one_block, ONE),
    "copy_not_made": (KVCacheManager, "take_transfers", without_one_copy, ONE),
    "block_not_stored": (HostTier, "take_transfers", without_one_store, ALL),
    "block_not_fetched": (HostTier, "take_transfers", without_one_fetch, ONE),
    "arriving_block_used_at_once": (HostTier, "is_arriving", not_at_all, ALL),
    "copy_source_not_held": (BlockPool, "hold", not_at_all, ALL),
    "blocks_not_published": (KVCacheManager, "publish", not_at_all, ONE),
    "evicted_block_stays_cached": (PrefixCache, "forget", forgets_nothing, ALL),
}


@pytest.mark.parametrize(
    ("mutation", "number"), [(name, number) for name, (*_, numbers) in MUTATIONS.items() for number in numbers]
)
def test_kv_world_detects_omitted_operation(monkeypatch: pytest.MonkeyPatch, mutation: str, number: int) -> None:
    owner, name, wrong, _ = MUTATIONS[mutation]
    monkeypatch.setattr(owner, name, nth(number, getattr(owner, name), wrong))
    assert_caught()


def test_kv_world_detects_hash_without_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_parent(sequence: Sequence, num_blocks: int, block_size: int) -> None:
        blocks = range(len(sequence.kv.digests), num_blocks)
        sequence.kv.digests += [
            bytes(sequence.token_ids(index * block_size, (index + 1) * block_size)) for index in blocks
        ]

    monkeypatch.setattr(prefix_cache, "extend_digests", without_parent)
    assert_caught()


def assert_caught() -> None:
    with pytest.raises((AssertionError, KeyError)):  # KeyError: inconsistent counts in the prefix cache
        for seed in range(8):
            run_random_operations(seed, num_operations=2_000)
