"""Random requests on small caches.

After every step the counts balance and the guarantees of scheduler.py hold. At the end every output equals that of the
request alone, and every block is free.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cache
from random import Random
from typing import Any
from unittest.mock import patch

import pytest
from msgspec import structs

from engine_worker.engine import Engine
from engine_worker.kv import state_tables
from engine_worker.kv.preemption import HostTierConfig, OffloadedPrefixes, PreemptionMode, TransferCosts
from engine_worker.kv.sequence import Sequence, SequenceStatus, ends_with_inflight_token
from engine_worker.kv.span import KVSpans
from engine_worker.scheduling.batch import ScheduledBatch
from engine_worker.scheduling.sequence_group import SequenceGroup
from engine_worker.scheduling.speculation.drafting import Proposer
from shared.messages import ErrorEvent, FinishEvent, FinishReason, GenerationRequest, StoredChoice, Usage
from tests.builders import (
    VOCAB_SIZE,
    FakeModelRunner,
    Transcript,
    drafting_by,
    expected_beams,
    expected_output,
    make_engine,
    make_prompt,
    make_request,
    preempted,
    run_to_end,
)
from tests.proposers import FakeHead, FlickeringGain, OracleProposer

pytestmark = pytest.mark.timeout(600)  # long simulations

NUM_SEEDS = 20
NUM_REQUESTS = 40
TENANTS: list[dict[str, Any]] = [
    {"tenant": "a"},
    {"tenant": "b", "tenant_weight": 2.0},
    {"tenant": "c", "tenant_weight": 4.0, "tenant_max_running": 2},
]


def random_settings(random: Random) -> dict[str, Any]:
    block_size = random.choice([1, 1, 2, 4, 8, 16])
    max_num_seqs = random.choice([1, 4, 8, 16])
    return {
        "block_size": block_size,
        "num_blocks": 1 + max(2, random.choice([32, 48, 64, 96]) // block_size),
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_seqs + random.choice([0, 1, 7, 64]),
        "max_prefill_tokens_with_decodes": random.choice([None, 1, 5]),
        "max_model_len": random.choice([30, 64, 100]),
        "enable_prefix_caching": random.random() < 0.7,
        "host_tier": random_host_tier(random, block_size),
    }


def fill_pool(random: Random, settings: dict[str, Any], windows: tuple[int, ...]) -> None:
    """Set a pool of one to three longest sequences and a token budget that is no multiple of the block size."""
    settings["max_num_batched_tokens"] = settings["max_num_seqs"] + random.choice([1, 3, 5, 9, 13])
    spans = KVSpans.of(windows, settings["block_size"], settings["max_num_batched_tokens"])
    settings["num_blocks"] = 1 + max(2, random.choice([1, 1, 2, 3]) * spans.max_blocks(settings["max_model_len"]))


def random_host_tier(random: Random, block_size: int) -> HostTierConfig | None:
    """Return None or a pool of 8 to 96 tokens whose transfers are cheaper than computing only for some lengths."""
    num_blocks = 1 + random.choice([8, 32, 96]) // block_size
    costs = TransferCosts(
        block_bytes=1,
        device_to_host_bytes_per_second=1.0,
        host_to_device_bytes_per_second=1.0,
        prefill_tokens_per_second=block_size / 4,
        fetch_seconds=random.choice([0.0, 3.0, 40.0]),
    )
    config = HostTierConfig(
        num_blocks=max(2, num_blocks),
        preemption_mode=random.choice(list(PreemptionMode)),
        costs=random.choice([None, costs]),
        offloaded_prefixes=random.choice(list(OffloadedPrefixes)),
    )
    return random.choice([None, config, config])


def with_host_states(config: HostTierConfig, random: Random) -> HostTierConfig:
    costs = replace(config.costs, state_bytes=random.choice([0, 3])) if config.costs else None
    mode = random.choice([PreemptionMode.SWAP, config.preemption_mode])
    return replace(config, num_state_blocks=random.choice([0, 4, 12, 12]), preemption_mode=mode, costs=costs)


def random_prompt(random: Random) -> list[int]:
    """Return a prompt; half of them share a beginning of varying length with others."""
    own = make_prompt(random.choice([1, 1, 2, 3, 5, 8, 17, 40]), first=random.randrange(VOCAB_SIZE))
    if random.random() < 0.5:
        return own
    return make_prompt(random.choice([4, 8, 13, 16]), first=random.choice([10, 20])) + own


def random_request(random: Random, number: int) -> GenerationRequest:
    max_tokens = random.randint(1, 60)
    if random.random() < 0.15:
        return random_beam_request(random, number)
    return make_request(
        random_prompt(random),
        request_id=f"r{number:02}",
        max_tokens=max_tokens,
        min_tokens=random.choice([0, 0, max_tokens // 2]),
        ignore_eos=random.random() < 0.7,
        temperature=random.choice([0.0, 1.0]),
        seed=random.randrange(2**32),
        stop_token_ids=tuple(random.sample(range(VOCAB_SIZE), k=random.choice([0, 0, 10]))),
        presence_penalty=random.choice([0.0] * 9 + [1.0]),
        n=random.choice([1, 1, 1, 2, 3, 5]),
    )


def random_beam_request(random: Random, number: int) -> GenerationRequest:
    width = random.choice([1, 2, 3, 4])
    return make_request(
        random_prompt(random),
        request_id=f"r{number:02}",
        max_tokens=random.randint(1, 30),
        use_beam_search=True,
        beam_width=width,
        n=random.randint(1, width),
        length_penalty=random.choice([0.0, 1.0, 2.0]),
        early_stopping=random.choice([False, True, "never"]),
        ignore_eos=random.random() < 0.3,
    )


Life = tuple[Sequence | str, int]  # a sequence between two preemptions


def life(sequence: Sequence) -> Life:
    """Return the identity of a sequence's life. Beams of one search are equal, because they fork in every step."""
    return (sequence.request_id, 0) if sequence.sampling.use_beam_search else (sequence, sequence.num_preemptions)


@dataclass
class Promises:
    """Checks every batch before it is executed. `arrivals` gives the order of arrival."""

    settings: dict[str, Any]
    has_tenants: bool = False
    engine: Engine | None = None
    arrivals: dict[str, int] = field(default_factory=dict)
    num_steps: int = 0
    num_preempted: int = 0
    num_cached_tokens: int = 0
    num_swapped_blocks: int = 0
    num_swapped_states: int = 0
    num_drafts: int = 0
    num_unknown_drafts: int = 0  # that only the device has
    last_event: int = 0
    running: set[Life] = field(default_factory=set)  # of the previous batch

    def __call__(self, batch: ScheduledBatch) -> None:
        assert self.engine is not None
        scheduler = self.engine._scheduler
        groups, waiting = list(scheduler._running.values()), list(scheduler._policy)
        scheduled = {item.sequence: item for item in batch.sequences}
        assert len(scheduled) == len(batch.sequences), "a sequence occurs twice in the batch"
        assert all(sequence.status is SequenceStatus.RUNNING for sequence in scheduled)
        yielded = preempted(scheduler, batch, self.last_event)
        self.last_event = scheduler.kv_events(self.last_event)["last"]
        active = {sequence: group for group in groups for sequence in group.active}
        ending = {s for s, group in active.items() if ends_with_inflight_token(s, group.max_num_tokens)}
        arrivals = {copy.target_block_id for copy in batch.transfers.kv.swap_in}
        states = {copy.target_block_id for copy in batch.transfers.states.swap_in}
        arriving = {
            sequence
            for sequence in active
            if not arrivals.isdisjoint(sequence.kv.blocks) or sequence.kv.state_block in states
        }
        assert not arriving & scheduled.keys(), "a sequence is computed before its KV arrived"
        old = {sequence for sequence in active if life(sequence) in self.running}
        for sequence in old:  # decodes are never starved
            if active[sequence].is_background:
                continue  # it waits while an interactive prompt is computed
            needs_prefill = sequence.num_uncomputed_tokens > 1 or sequence.sampling.use_beam_search
            assert needs_prefill or sequence in scheduled.keys() | ending
        self._check_order([*groups, *waiting])
        self._check_budget(batch)
        self.running = set(map(life, active))
        if not groups:  # a fork ended before its state was copied
            assert not batch.sequences
            return
        oldest = next((group for group in groups if not group.is_background), groups[0])
        moving = scheduled.keys() | ending | arriving | (active.keys() - old)
        if not self.has_tenants:
            assert not moving.isdisjoint(oldest.active), "the oldest group must progress; a batch group only if alone"
        prompts = [
            item
            for item in batch.sequences
            if item.num_new_tokens > 1 + len(item.drafts) and not self._is_background(item.sequence)
        ]
        assert not prompts or not any(map(self._is_background, scheduled)), "batch group beside an interactive prompt"
        self.num_swapped_blocks += len(batch.transfers.kv.swap_in)
        self.num_swapped_states += len(states)
        self.num_steps += 1
        self.num_preempted += len(yielded)

    def _is_background(self, sequence: Sequence) -> bool:
        return sequence.request_id.startswith("b")

    def _check_order(self, groups: list[SequenceGroup]) -> None:
        """Check the order of arrival within a tenant. A group preempted twice may have been pinned."""
        orders: dict[tuple[bool, str], list[int]] = {}
        for group in groups:
            if group.num_preemptions < 2 and group.sampling.num_sequences == 1 and not self.has_tenants:
                orders.setdefault((group.is_background, group.tenant.name), []).append(self.arrivals[group.request_id])
        assert all(order == sorted(order) for order in orders.values())

    def _check_budget(self, batch: ScheduledBatch) -> None:
        assert not batch.is_empty and batch.num_tokens <= self.settings["max_num_batched_tokens"]
        decodes = [
            item
            for item in batch.sequences
            if life(item.sequence) in self.running and item.num_new_tokens == 1 + len(item.drafts) and item.samples
        ]
        self.num_drafts += sum(len(item.drafts) for item in decodes)
        self.num_unknown_drafts += sum(len(item.drafts) for item in decodes if item.has_unknown_drafts)
        cap = self.settings["max_prefill_tokens_with_decodes"]
        assert cap is None or not decodes or batch.num_tokens - sum(item.num_new_tokens for item in decodes) <= cap


def random_mishap(random: Random, engine: Engine, runner: FakeModelRunner) -> str | None:
    """Sometimes abort a request or make one fail. Return the id of an aborted request."""
    live = sorted(engine.request_ids)
    if live and random.random() < 0.03:
        runner.failures[random.choice(live)] = "broken"
    if live and random.random() < 0.05:
        request_id = random.choice(live)
        engine.abort_request(request_id)
        engine.check_integrity()
        return request_id
    return None


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_random_requests_keep_guarantees(seed: int, async_scheduling: bool) -> None:
    run_random_traffic(seed, async_scheduling, 0.0)


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("seed", range(20))
def test_random_requests_of_both_classes_keep_guarantees(seed: int, async_scheduling: bool) -> None:
    run_random_traffic(seed, async_scheduling, 0.5)


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("seed", range(15))
def test_random_requests_with_window_keep_guarantees(seed: int, async_scheduling: bool) -> None:
    run_random_traffic(seed, async_scheduling, 0.2, random_window(seed))


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("seed", range(20))
def test_random_drafts_change_no_output(seed: int, async_scheduling: bool) -> None:
    """Right and wrong drafts beside preemption, swap, windows, groups, forks, aborts, tenants and both classes."""
    run = run_with_drafts(seed, async_scheduling)
    has_room = run.settings["max_num_batched_tokens"] - run.settings["max_num_seqs"] > 1
    assert run.num_drafts > 0 or not has_room


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("seed", range(30))
def test_random_drafts_of_a_head_change_no_output(seed: int, async_scheduling: bool) -> None:
    """As above, with drafts that only the device has while steps run ahead."""
    run = run_with_head(seed, async_scheduling)
    has_room = run.settings["max_num_batched_tokens"] - run.settings["max_num_seqs"] > 1
    assert run.num_drafts > 0 or not has_room
    assert not head_of(seed, async_scheduling).kept


def test_random_drafts_of_a_head_run_ahead_and_are_preempted() -> None:
    runs = [run_with_head(seed, True) for seed in range(30)]
    assert sum(run.num_unknown_drafts for run in runs) > 1_500
    assert sum(run.num_preempted for run in runs) > 50


@pytest.mark.parametrize("mode", [PreemptionMode.SWAP, PreemptionMode.RECOMPUTE])
def test_sequences_with_drafts_in_flight_are_preempted(mode: PreemptionMode) -> None:
    """What is computed of them is known only when the step in flight ends, half of whose drafts are wrong."""
    num_preempted = 0

    def count(batch: ScheduledBatch) -> None:
        nonlocal num_preempted
        sequences = [sequence for group in engine._scheduler._policy for sequence in group.sequences]
        num_preempted += sum(sequence.num_inflight_tokens > 1 for sequence in sequences)

    for seed in range(60):
        random, pool = Random(seed), dict[str, Any](num_blocks=17, block_size=4)
        engine = make_engine(
            FakeModelRunner(**pool, before_step=count, draft_error_ratio=0.5),
            **pool,
            host_tier=HostTierConfig(num_blocks=200, preemption_mode=mode),
            drafting=drafting_by(FakeHead(3), may_run_ahead=True),
            async_scheduling=True,
        )
        requests = [make_request(random.randint(1, 12), f"{n}", max_tokens=40, ignore_eos=True) for n in range(6)]
        for request in requests:
            engine.add_request(request)
        check_outputs(requests, run_to_end(engine), engine)
    assert num_preempted > 10


def run_with_drafts(seed: int, async_scheduling: bool) -> "Promises":
    windows = random_windows(seed) if seed % 2 else (0,)
    window = 0 if 0 in windows else max(windows)
    proposer = OracleProposer(error_ratio=(0.0, 0.1, 0.3, 1.0)[seed % 4], window=window, seed=seed)
    run = run_random_traffic(
        seed, async_scheduling, 0.2, windows, full_pool=seed % 3 == 0, has_tenants=seed % 5 == 0, proposer=proposer
    )
    assert not proposer.kept
    return run


def run_with_head(seed: int, async_scheduling: bool) -> "Promises":
    windows = random_windows(seed) if seed % 7 == 0 else (0,)
    return run_random_traffic(
        seed,
        async_scheduling,
        0.2,
        windows,
        full_pool=seed % 3 > 0,
        has_tenants=seed % 11 == 0,
        proposer=head_of(seed, async_scheduling),
    )


@cache
def head_of(seed: int, async_scheduling: bool) -> FakeHead:
    return FakeHead(1 + seed % 5)


def random_window(seed: int) -> tuple[int, ...]:
    return (Random(seed).choice([2, 5, 20, 40]),)


def random_windows(seed: int) -> tuple[int, ...]:
    """Return the windows of 1 to 4 groups, each 0 to 64; half of the groups have none."""
    random = Random(f"groups {seed}")
    return tuple(random.choice([0, random.randint(1, 64)]) for _ in range(random.randint(1, 4)))


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("seed", range(20))
def test_random_requests_with_groups_keep_guarantees(seed: int, async_scheduling: bool) -> None:
    run_random_traffic(seed, async_scheduling, 0.2, random_windows(seed))


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
def test_random_requests_dropped_copy_takes_no_block(async_scheduling: bool) -> None:
    """Regression: the table counted the copied block after the drop, which crashed the worker."""
    run_random_traffic(90339, async_scheduling, 0.2, (33,))


def test_window_in_full_pool_drops_the_copy() -> None:
    """6 blocks of 8 with a window of 33: the second prompt finds a partly filled block without room to keep it."""
    engine = make_engine(
        FakeModelRunner(num_blocks=7, block_size=8, windows=(33,)),
        num_blocks=7,
        block_size=8,
        windows=(33,),
        max_num_batched_tokens=4,
        max_num_seqs=4,
    )
    prompt, transcript = make_prompt(100, first=3), Transcript()
    requests = [make_request(prompt[:length], max_tokens=3, ignore_eos=True) for length in (23, 41)]
    for request in requests:
        engine.add_request(request)
    run_to_end(engine, transcript)
    check_outputs(requests, transcript, engine, 33)


@pytest.mark.parametrize("seed", range(15))
def test_random_requests_in_full_pool_keep_guarantees(seed: int) -> None:
    run_full_pool(seed)


def test_preempted_beams_fork_at_the_end_of_the_prompt() -> None:
    """Regression: the first left a block in the groups with windows alone, and another beam wrote to it in all."""
    run_full_pool(7_300_452)


def run_full_pool(seed: int) -> "Promises":
    """Run one schedule whose pool holds exactly a whole number of longest sequences, often with windows and groups."""
    random = Random(seed)
    windows = (random.choice([0, 2, 5, 17, 20, 33, 40]),) if seed % 2 else random_windows(seed)
    return run_random_traffic(
        seed, random.random() < 0.5, 0.2, windows, full_pool=True, has_tenants=random.random() < 0.3
    )


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("seed", range(20))
def test_random_requests_of_tenants_keep_guarantees(seed: int, async_scheduling: bool) -> None:
    run_random_traffic(seed, async_scheduling, 0.2, random_window(seed) if seed % 2 else (0,), has_tenants=True)


def test_random_requests_with_window_preempt_and_share() -> None:
    for async_scheduling in (False, True):
        runs = [run_random_traffic(seed, async_scheduling, 0.2, random_window(seed)) for seed in range(20)]
        assert sum(run.num_preempted for run in runs) > 20
        assert sum(run.num_cached_tokens for run in runs) > 80
        assert sum(run.num_swapped_blocks for run in runs) > 20


def test_random_requests_preempt_often() -> None:
    """The tests above need long runs with preemptions to be meaningful."""
    for async_scheduling in (False, True):
        runs = [run_random_traffic(seed, async_scheduling, 0.0) for seed in range(20)]
        assert sum(run.num_steps for run in runs) > 3_500
        assert sum(run.num_preempted for run in runs) > 80
        assert sum(run.num_cached_tokens for run in runs) > 200
        assert sum(run.num_swapped_blocks for run in runs) > 100


def run_with_states(seed: int, async_scheduling: bool, proposer: OracleProposer | FakeHead | None = None) -> "Promises":
    """Keep states more often than for real prompts, because these are short."""
    with patch.multiple(state_tables, CHECKPOINT_TOKENS=16, DISTANT_TOKENS=32):
        return run_random_traffic(
            seed,
            async_scheduling,
            0.2,
            num_state_blocks=2 + seed % 20,
            has_tenants=seed % 3 == 0,
            proposer=proposer,
        )


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("seed", range(15))
def test_random_requests_with_recurrent_states_keep_guarantees(seed: int, async_scheduling: bool) -> None:
    run_with_states(seed, async_scheduling)


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("seed", range(20))
def test_random_drafts_beside_recurrent_states_change_no_output(seed: int, async_scheduling: bool) -> None:
    run_with_states(seed, async_scheduling, OracleProposer(error_ratio=0.4, seed=seed))


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("seed", range(15))
def test_random_drafts_of_a_head_beside_recurrent_states_change_no_output(seed: int, async_scheduling: bool) -> None:
    run_with_states(seed, async_scheduling, head_of(seed, async_scheduling))


def test_random_drafts_of_a_head_beside_recurrent_states_run_ahead_and_are_preempted() -> None:
    runs = [run_with_states(seed, True, head_of(seed, True)) for seed in range(15)]
    assert sum(run.num_unknown_drafts for run in runs) > 500
    assert sum(run.num_preempted for run in runs) > 50


def test_random_requests_with_recurrent_states_swap_and_share() -> None:
    for async_scheduling in (False, True):
        runs = [run_with_states(seed, async_scheduling) for seed in range(15)]
        assert sum(run.num_cached_tokens for run in runs) > 25
        assert sum(run.num_swapped_states for run in runs) > 50


@cache
def run_random_traffic(
    seed: int,
    async_scheduling: bool,
    batch_ratio: float,
    windows: tuple[int, ...] = (0,),
    full_pool: bool = False,
    has_tenants: bool = False,
    num_state_blocks: int = 0,
    proposer: OracleProposer | FakeHead | None = None,
) -> Promises:
    random, classes, tenants = Random(seed), Random(seed), Random(seed)
    settings = random_settings(random)
    if any(windows):  # otherwise no sequence would be preempted
        settings["num_blocks"] = 1 + max(2, settings["num_blocks"] // 2)
    settings["num_blocks"] = 1 + (settings["num_blocks"] - 1) * len(windows)
    if num_state_blocks:
        host_tier = settings["host_tier"] or HostTierConfig(num_blocks=1 + 96 // settings["block_size"])
        settings["host_tier"] = with_host_states(host_tier, Random(seed))
    if full_pool:
        fill_pool(Random(seed), settings, windows)
    promises = Promises(settings, has_tenants)
    num_blocks, block_size = settings["num_blocks"], settings["block_size"]
    kinds: dict[str, Any] = {"windows": windows, "num_state_blocks": num_state_blocks}
    runner = FakeModelRunner(
        num_blocks=num_blocks,
        block_size=block_size,
        before_step=promises,
        # Drafts of a head; without one they are as those that grammars force.
        draft_error_ratio=(0.0, 0.1, 0.3, 1.0)[seed % 4] if isinstance(proposer, FakeHead) or seed % 5 == 0 else None,
        **kinds,
    )
    drafting = random_drafting(seed, proposer, may_run_ahead=async_scheduling and not any(windows))
    promises.engine = engine = make_engine(
        runner, async_scheduling=async_scheduling, drafting=drafting, **kinds, **settings
    )
    requests: dict[str, GenerationRequest] = {}
    cancelled: set[str] = set()
    transcript = Transcript()
    while len(requests) < NUM_REQUESTS or engine.has_work:
        for _ in range(random.choice([0, 0, 0, 1, 3]) if len(requests) < NUM_REQUESTS else 0):
            request = random_request(random, number=len(requests))
            while num_state_blocks and request.sampling.use_beam_search:  # refused
                request = random_request(random, number=len(requests))
            request = without_rules(request, proposer, seed)
            if classes.random() < batch_ratio:
                request = structs.replace(request, request_id=f"b{len(requests):02}", priority_class="batch")
            if has_tenants:
                request = structs.replace(request, **tenants.choice(TENANTS))
            requests[request.request_id] = request
            promises.arrivals[request.request_id] = len(requests)
            engine.add_request(request)
        transcript.add(engine.step())
        engine.check_integrity()
        if (request_id := random_mishap(random, engine, runner)) is not None:
            cancelled.add(request_id)
        assert promises.num_steps < 5_000, "the engine makes no progress"
    stats = engine.stats()
    assert (stats.kv_cache.num_active_blocks, stats.num_running, stats.num_waiting) == (0, 0, 0)
    num_unseen = sum(stats.counters.preemptions.values()) - promises.num_preempted
    # Async: sequences may be preempted in a step that computes nothing, when all others have a last token in flight.
    assert num_unseen >= 0 if async_scheduling else num_unseen == 0
    assert transcript.ends.keys() == requests.keys() - cancelled
    check_outputs(requests.values(), transcript, engine, 0 if 0 in windows else max(windows))
    ends = [end for end in transcript.ends.values() if isinstance(end, FinishEvent)]
    promises.num_cached_tokens = sum(end.usage.cached_tokens for end in ends)
    promises.engine = None  # no longer needed
    return promises


def random_drafting(seed: int, proposer: Proposer | None, *, may_run_ahead: bool) -> Any:
    if proposer is None:
        return None
    return drafting_by(proposer, 5, FlickeringGain(seed) if seed % 2 else None, may_run_ahead=may_run_ahead)


def without_rules(request: GenerationRequest, proposer: Proposer | None, seed: int) -> GenerationRequest:
    """Return a request beside which steps can run ahead with the drafts of a head; unchanged for every fifth seed."""
    if not isinstance(proposer, FakeHead) or seed % 5 == 0:
        return request
    return structs.replace(request, sampling=structs.replace(request.sampling, min_tokens=0, presence_penalty=0.0))


def check_outputs(
    requests: Iterable[GenerationRequest], transcript: Transcript, engine: Engine, window: int = 0
) -> None:
    scheduler = engine._scheduler
    for request in requests:
        num_beams, num_prompt = request.sampling.beam_width or 1, len(request.prompt_token_ids)
        longest = scheduler.max_num_tokens_of(num_prompt, num_beams)
        end = transcript.ends.get(request.request_id)
        tokens = [transcript.choice(request.request_id, choice) for choice in range(request.sampling.n)]
        if num_prompt >= longest or num_beams > scheduler.config.max_beam_width:
            assert end is None or isinstance(end, ErrorEvent)
            continue
        if request.sampling.use_beam_search:
            expected = [output for output, _ in expected_beams(request, max_num_tokens=longest, window=window)]
        else:
            choices = range(request.sampling.n)
            expected = [
                expected_output(request, max_num_tokens=longest, choice=choice, window=window) for choice in choices
            ]
        if isinstance(end, FinishEvent):
            assert tokens == expected
            assert (end.usage.prompt_tokens, end.usage.completion_tokens) == (num_prompt, sum(map(len, expected)))
            assert 0 <= end.usage.cached_tokens < num_prompt
        else:  # cancelled or broken
            assert tokens == [output[: len(got)] for got, output in zip(tokens, expected, strict=True)]


ROOMY: dict[str, Any] = {"num_blocks": 400, "block_size": 16, "max_num_batched_tokens": 512, "max_model_len": 100}


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize(
    ("changes", "preempts"),
    [
        ({}, False),
        ({"max_num_seqs": 1}, False),
        ({"max_num_batched_tokens": 8}, False),
        ({"max_num_batched_tokens": 13, "max_prefill_tokens_with_decodes": 2}, False),
        ({"block_size": 1, "num_blocks": 120}, True),
        ({"block_size": 8, "num_blocks": 14}, True),
        ({"block_size": 32, "num_blocks": 12}, False),
        ({"block_size": 4, "num_blocks": 26, "max_num_batched_tokens": 9}, True),
    ],
    ids=str,
)
def test_schedule_settings_do_not_change_outputs(
    changes: dict[str, int], preempts: bool, async_scheduling: bool
) -> None:
    random = Random(7)
    requests = [random_request(random, number) for number in range(24)]
    engine = make_engine(async_scheduling=async_scheduling, **{**ROOMY, **changes})
    transcript = Transcript()
    for request in requests:  # two requests arrive per step
        engine.add_request(request)
        if len(engine.request_ids) % 2 == 0:
            transcript.add(engine.step())
    run_to_end(engine, transcript)
    check_outputs(requests, transcript, engine)
    assert len(transcript.ends) == len(requests)
    assert (engine.stats().counters.preemptions["recompute"] > 0) is preempts


@pytest.mark.parametrize("num_journal_tokens", range(13))
def test_takeover_at_any_token_gives_same_output(num_journal_tokens: int) -> None:
    for temperature in (0.0, 1.0):
        request = make_request(9, max_tokens=12, ignore_eos=True, temperature=temperature, seed=5)
        expected = expected_output(request)
        journal = expected[:num_journal_tokens]
        engine = make_engine(num_blocks=9, block_size=4)
        engine.add_request(request, [StoredChoice(journal)])
        engine.add_request(make_request(6, max_tokens=20, ignore_eos=True))
        transcript = Transcript()
        transcript.resume(request.request_id, journal)
        run_to_end(engine, transcript)
        assert transcript.tokens[request.request_id] == expected
        end = transcript.ends[request.request_id]
        assert end == FinishEvent(request.request_id, FinishReason.LENGTH, Usage(prompt_tokens=9, completion_tokens=12))


@pytest.mark.parametrize("seed", [7, 92, 93, 202])
def test_burst_of_choices_forks_from_blocks_that_are_being_copied(seed: int) -> None:
    """Choices that lacked a slot fork in steps that also copy the blocks that they share; 2 % of the seeds do so."""
    random = Random(seed)
    sizes: dict[str, Any] = {"num_blocks": 1025, "block_size": 4}
    limits: dict[str, Any] = {"max_model_len": 2048, "max_num_seqs": 32, "max_num_batched_tokens": 256}
    engine = make_engine(FakeModelRunner(**sizes), async_scheduling=seed % 2 == 1, eos_token_ids=(), **sizes, **limits)
    requests: list[GenerationRequest] = []
    transcript = Transcript()
    while engine.has_work or len(requests) < 25:
        while len(requests) < 25 and random.random() < 0.8:
            num_choices = random.choice([1, 1, 3, 1])
            prompt = make_prompt(random.randint(2, 60), first=random.randrange(900))
            asked = {"max_tokens": random.randint(65, 260), "seed": random.getrandbits(31), "n": num_choices}
            requests.append(make_request(prompt, f"r{len(requests)}", ignore_eos=True, temperature=1.0, **asked))
            engine.add_request(requests[-1])
        transcript.add(engine.step())
    check_outputs(requests, transcript, engine)
