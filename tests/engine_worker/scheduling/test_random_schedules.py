"""Random traffic on small caches: after every step the counts balance and the promises of scheduler.py hold; in the end
every output is what the model gives for that request alone, and every block is free.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from random import Random
from typing import Any

import pytest
from msgspec import structs

from engine_worker.engine import Engine
from engine_worker.scheduling.batch import ScheduledBatch
from engine_worker.scheduling.preemption import HostTierConfig, OffloadedPrefixes, PreemptionMode, TransferCosts
from engine_worker.scheduling.sequence import Sequence, ends_with_inflight_token
from engine_worker.scheduling.sequence_group import SequenceGroup
from shared.messages import ErrorEvent, FinishEvent, FinishReason, GenerationRequest, StoredChoice, Usage
from tests.builders import (
    VOCAB_SIZE,
    FakeModelRunner,
    Transcript,
    expected_beams,
    expected_output,
    make_engine,
    make_prompt,
    make_request,
    preempted,
    run_to_end,
)

pytestmark = pytest.mark.timeout(600)  # long histories

NUM_SEEDS = 100
NUM_REQUESTS = 40


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


def random_host_tier(random: Random, block_size: int) -> HostTierConfig | None:
    """None, or a pool of 8 to 96 tokens with transfers that are cheaper than computing for some lengths only."""
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


def random_prompt(random: Random) -> list[int]:
    """Every second one begins as others do, up to any token."""
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


@dataclass
class Promises:
    """Looks at every batch before it is executed; arrival order is the order of `arrivals`."""

    settings: dict[str, Any]
    engine: Engine | None = None
    arrivals: dict[str, int] = field(default_factory=dict)
    num_steps: int = 0
    num_preempted: int = 0
    num_cached_tokens: int = 0
    num_swapped_blocks: int = 0
    last_event: int = 0
    last_step: set[tuple[str, int]] = field(default_factory=set)
    running: set[str] = field(default_factory=set)
    forked: set[tuple[str, int]] = field(default_factory=set)

    def __call__(self, batch: ScheduledBatch) -> None:
        assert self.engine is not None
        scheduler = self.engine._scheduler
        groups, waiting = list(scheduler._running.values()), list(scheduler._policy)
        scheduled = {item.sequence: item for item in batch.sequences}
        assert len(scheduled) == len(batch.sequences), "a sequence is in the batch twice"
        names = {sequence.request_id for sequence in scheduled}
        yielded = preempted(scheduler, batch, self.last_event)
        self.last_event = scheduler.kv_events(self.last_event)["last"]
        assert names.isdisjoint(yielded)
        ending = {
            sequence
            for group in groups
            for sequence in group.active
            if ends_with_inflight_token(sequence, group.max_num_tokens)
        }
        arrivals = {copy.target_block_id for copy in batch.swap_in}
        arriving = {s for group in groups for s in group.active if not arrivals.isdisjoint(s.kv.block_table)}
        assert not arriving & scheduled.keys(), "a sequence is computed before its KV is there"
        late = {group.request_id for group in groups if not arriving.isdisjoint(group.active)}
        late |= {group.request_id for group in groups if len(group.active) > 1} - self.running  # swapped in
        self.running = {group.request_id for group in groups}
        lives = {group.request_id: (group.request_id, group.num_preemptions) for group in groups}
        for group in groups:  # decode is never starved; a fork may take a step
            if group.is_background:
                continue  # which waits while an interactive prompt is computed
            for sequence in group.active if lives[group.request_id] in self.forked else []:
                behind = sequence.num_uncomputed_tokens > 1 or sequence.sampling.use_beam_search
                assert behind or sequence in scheduled.keys() | ending or group.request_id in late
        forked = {lives[group.request_id] for group in groups if group.is_forked}
        just_forked, self.forked = forked - self.forked, forked
        self._check_order([*groups, *waiting])
        self._check_budget(batch, lives)
        self.last_step = {lives[name] for name in names | late} | just_forked
        moving = scheduled.keys() | ending | arriving
        oldest = next((group for group in groups if not group.is_background), groups[0])
        moves = any(sequence in moving for sequence in oldest.active) or oldest.request_id in late
        assert moves or lives[oldest.request_id] in just_forked, "the oldest moves on, in the background if it is alone"
        prompts = [
            item for item in batch.sequences if item.num_new_tokens > 1 and not self._is_background(item.sequence)
        ]
        assert not prompts or not any(map(self._is_background, scheduled)), "a batch beside an interactive prompt"
        self.num_swapped_blocks += len(batch.swap_in)
        self.num_steps += 1
        self.num_preempted += len(yielded)

    def _is_background(self, sequence: Sequence) -> bool:
        return sequence.request_id.startswith("b")

    def _check_order(self, groups: list[SequenceGroup]) -> None:
        for is_background in (False, True):
            order = [
                self.arrivals[group.request_id]
                for group in groups
                if group.num_preemptions < 2 and group.is_background is is_background
            ]
            assert order == sorted(order), "first come, first served; who was preempted twice may have been pinned"

    def _check_budget(self, batch: ScheduledBatch, lives: dict[str, tuple[str, int]]) -> None:
        assert not batch.is_empty and batch.num_tokens <= self.settings["max_num_batched_tokens"]
        decodes = [
            item
            for item in batch.sequences
            if (self._is_background(item.sequence) or lives[item.sequence.request_id] in self.last_step)
            and item.num_new_tokens == 1
            and item.samples
        ]
        cap = self.settings["max_prefill_tokens_with_decodes"]
        assert cap is None or not decodes or batch.num_tokens - len(decodes) <= cap


def random_mishap(random: Random, engine: Engine, runner: FakeModelRunner) -> str | None:
    """Perhaps cancel a live request, and perhaps break one; returns the cancelled one."""
    live = sorted(engine.request_ids)
    if live and random.random() < 0.03:
        runner.failures[random.choice(live)] = "broken"
    if live and random.random() < 0.05:
        request_id = random.choice(live)
        engine.abort_request(request_id)
        engine.check_integrity()
        return request_id
    return None


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["in_turn", "ahead"])
@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_random_traffic(seed: int, async_scheduling: bool) -> None:
    run_random_traffic(seed, async_scheduling, 0.0)


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["in_turn", "ahead"])
@pytest.mark.parametrize("seed", range(40))
def test_random_traffic_of_both_classes(seed: int, async_scheduling: bool) -> None:
    run_random_traffic(seed, async_scheduling, 0.5)


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["in_turn", "ahead"])
@pytest.mark.parametrize("seed", range(60))
def test_random_traffic_with_a_window(seed: int, async_scheduling: bool) -> None:
    run_random_traffic(seed, async_scheduling, 0.2, random_window(seed))


def random_window(seed: int) -> int:
    return Random(seed).choice([2, 5, 20, 40])


def test_random_traffic_with_a_window_preempts_and_shares() -> None:
    for async_scheduling in (False, True):
        runs = [run_random_traffic(seed, async_scheduling, 0.2, random_window(seed)) for seed in range(20)]
        assert sum(run.num_preempted for run in runs) > 20
        assert sum(run.num_cached_tokens for run in runs) > 80
        assert sum(run.num_swapped_blocks for run in runs) > 20


def test_random_traffic_is_long_and_preempts_often() -> None:
    """Else the tests above would prove little."""
    for async_scheduling in (False, True):
        runs = [run_random_traffic(seed, async_scheduling, 0.0) for seed in range(20)]
        assert sum(run.num_steps for run in runs) > 3_500
        assert sum(run.num_preempted for run in runs) > 80
        assert sum(run.num_cached_tokens for run in runs) > 350
        assert sum(run.num_swapped_blocks for run in runs) > 100


@cache
def run_random_traffic(seed: int, async_scheduling: bool, batch_ratio: float, window: int = 0) -> Promises:
    random, classes = Random(seed), Random(seed)
    settings = random_settings(random)
    if window:  # else nobody would ever yield
        settings["num_blocks"] = 1 + max(2, settings["num_blocks"] // 2)
    promises = Promises(settings)
    num_blocks, block_size = settings["num_blocks"], settings["block_size"]
    runner = FakeModelRunner(num_blocks=num_blocks, block_size=block_size, window=window, before_step=promises)
    promises.engine = engine = make_engine(runner, async_scheduling=async_scheduling, window=window, **settings)
    requests: dict[str, GenerationRequest] = {}
    cancelled: set[str] = set()
    transcript = Transcript()
    while len(requests) < NUM_REQUESTS or engine.has_work:
        for _ in range(random.choice([0, 0, 0, 1, 3]) if len(requests) < NUM_REQUESTS else 0):
            request = random_request(random, number=len(requests))
            if classes.random() < batch_ratio:
                request = structs.replace(request, request_id=f"b{len(requests):02}", priority_class="batch")
            requests[request.request_id] = request
            promises.arrivals[request.request_id] = len(requests)
            engine.add_request(request)
        transcript.add(engine.step())
        engine.check_integrity()
        if (request_id := random_mishap(random, engine, runner)) is not None:
            cancelled.add(request_id)
        assert promises.num_steps < 5_000, "livelock"
    stats = engine.stats()
    assert (stats.kv_cache.num_active_blocks, stats.num_running, stats.num_waiting) == (0, 0, 0)
    num_unseen = sum(stats.counters.preemptions.values()) - promises.num_preempted
    # One ahead, sequences may yield in a step that computes nothing, as all others have their last token in flight.
    assert num_unseen >= 0 if async_scheduling else num_unseen == 0
    assert transcript.ends.keys() == requests.keys() - cancelled
    check_outputs(requests.values(), transcript, engine, window)
    ends = [end for end in transcript.ends.values() if isinstance(end, FinishEvent)]
    promises.num_cached_tokens = sum(end.usage.cached_tokens for end in ends)
    promises.engine = None  # no longer needed
    return promises


def check_outputs(
    requests: Iterable[GenerationRequest], transcript: Transcript, engine: Engine, window: int = 0
) -> None:
    scheduler = engine._scheduler
    for request in requests:
        num_sequences, num_prompt = request.sampling.num_sequences, len(request.prompt_token_ids)
        longest = scheduler.max_num_tokens_of(num_prompt, num_sequences)
        end = transcript.ends.get(request.request_id)
        tokens = [transcript.choice(request.request_id, choice) for choice in range(request.sampling.n)]
        if num_prompt >= longest or num_sequences > scheduler.config.max_num_seqs:
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


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["in_turn", "ahead"])
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
def test_batch_chunks_blocks_and_preemption_do_not_change_outputs(
    changes: dict[str, int], preempts: bool, async_scheduling: bool
) -> None:
    random = Random(7)
    requests = [random_request(random, number) for number in range(24)]
    engine = make_engine(async_scheduling=async_scheduling, **{**ROOMY, **changes})
    transcript = Transcript()
    for request in requests:  # two arrive in each step
        engine.add_request(request)
        if len(engine.request_ids) % 2 == 0:
            transcript.add(engine.step())
    run_to_end(engine, transcript)
    check_outputs(requests, transcript, engine)
    assert len(transcript.ends) == len(requests)
    assert (engine.stats().counters.preemptions["recompute"] > 0) is preempts


@pytest.mark.parametrize("num_journal_tokens", range(13))
def test_a_takeover_at_any_token_gives_the_same_output(num_journal_tokens: int) -> None:
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
