"""What a worker claims: enough that no step idles while work is in the queue, and no more than steps can start."""

import random
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
from msgspec import structs

from engine_worker.engine import Engine
from engine_worker.scheduling.batch import ScheduledBatch
from engine_worker.scheduling.claim_budget import ClaimBudget
from shared.messages import GenerationRequest
from tests.builders import FakeModelRunner, make_engine, make_request

pytestmark = pytest.mark.timeout(600)  # long histories

Claim = Callable[[Engine, deque[GenerationRequest]], list[GenerationRequest]]
BUDGET, SEATS, BLOCKS = 128, 16, 1600


def claim_what_starts(engine: Engine, queue: deque[GenerationRequest]) -> list[GenerationRequest]:
    """As the worker does: again and again while the step runs, those on their way counted."""
    claimed: list[GenerationRequest] = []
    while queue and (taken := take(engine.claim_budget, claimed, queue)):
        claimed += taken
    return claimed


def take(
    claim_budget: ClaimBudget, claimed: list[GenerationRequest], queue: deque[GenerationRequest]
) -> list[GenerationRequest]:
    """As TAKE reads them."""
    num_on_way, tokens_on_way = len(claimed), sum(len(request.prompt_token_ids) for request in claimed)
    most, enough_tokens = (
        claim_budget.max_requests(num_on_way, tokens_on_way),
        claim_budget.num_wanted_tokens(tokens_on_way),
    )
    taken = list[GenerationRequest]()
    while queue and len(taken) < most and sum(len(request.prompt_token_ids) for request in taken) < enough_tokens:
        taken.append(queue.popleft())
    return taken


def claim_all_seats(engine: Engine, queue: deque[GenerationRequest]) -> list[GenerationRequest]:
    """As before: all that seats and blocks allow, once nothing waits."""
    stats = engine.stats()
    num_seats = min(SEATS - stats.num_running, stats.kv_cache.num_available_blocks - stats.num_running - 1)
    return [queue.popleft() for _ in range(min(num_seats, len(queue)))] if not stats.num_waiting else []


def serve(engine: Engine, request: GenerationRequest) -> None:
    """To its end, alone."""
    engine.add_request(request)
    while engine.has_work:
        engine.step()


class Served:
    """A queue and an engine whose claims take as long as the step that they are made beside."""

    def __init__(self, claim: Claim, *, ahead: bool) -> None:
        self.num_steps = 0
        self.had_work = False  # in the queue, when this step was scheduled
        self.most_waiting = 0
        self.idle_steps: list[str] = []
        self.claim = claim
        shape: dict[str, Any] = {"num_blocks": BLOCKS + 1, "block_size": 4}
        self.engine = make_engine(
            FakeModelRunner(before_step=self._look_for_idle_capacity, **shape),
            **shape,
            max_num_seqs=SEATS,
            max_num_batched_tokens=BUDGET,
            max_model_len=256,
            enable_prefix_caching=False,  # nobody foresees a hit: it leaves budget over in its step
            async_scheduling=ahead,
        )

    def run(self, requests: list[GenerationRequest]) -> None:
        queue = deque(requests)
        on_way = self.claim(self.engine, queue)
        while queue or on_way or self.engine.has_work:
            for request in on_way:
                self.engine.add_request(request)
            self.had_work = bool(queue)
            on_way = self.claim(self.engine, queue)
            self.engine.step()
            self.num_steps += 1
            self.engine.check_integrity()
            self.most_waiting = max(self.most_waiting, self.engine.stats().num_waiting)

    def _look_for_idle_capacity(self, batch: ScheduledBatch) -> None:
        """There are blocks for every seat, so a step lacks seats, tokens of its budget, or work."""
        num_tokens, num_running = sum(one.num_new_tokens for one in batch.sequences), self.engine.stats().num_running
        if self.had_work and num_tokens < BUDGET and num_running < SEATS:
            self.idle_steps.append(f"step {self.num_steps}: {num_tokens} tokens, {num_running} seats")


def traffic(kind: str, seed: int) -> list[GenerationRequest]:
    source = random.Random(seed)
    lengths = {
        "short": lambda: source.randint(1, 12),
        "long": lambda: source.randint(60, 200),
        "mixed": lambda: source.choice([2, 5, 9, 150, 200]),
    }[kind]
    return [make_request(lengths(), max_tokens=source.randint(4, 40), ignore_eos=True) for _ in range(150)]


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("kind", ["short", "long", "mixed"])
def test_no_step_idles_while_work_waits_in_the_queue(kind: str, ahead: bool) -> None:
    for seed in range(5):
        served = Served(claim_what_starts, ahead=ahead)
        served.run(traffic(kind, seed))
        assert served.idle_steps == []


@pytest.mark.parametrize("kind", ["short", "long", "mixed"])
def test_a_saturated_worker_takes_no_more_steps_than_when_it_claimed_all_seats(kind: str) -> None:
    now = before = 0
    for seed in range(5):
        for claim in (claim_what_starts, claim_all_seats):
            served = Served(claim, ahead=True)
            served.run(traffic(kind, seed))
            now += served.num_steps * (claim is claim_what_starts)
            before += served.num_steps * (claim is claim_all_seats)
    assert before / now >= 0.99


def test_what_cannot_start_soon_stays_in_the_queue() -> None:
    """300 prompts of 100 tokens, for which there are seats: a step computes 1.28 of them."""
    engine = Served(claim_what_starts, ahead=True).engine
    queue = deque(make_request(100) for _ in range(300))
    claimed = claim_what_starts(engine, queue)
    assert 2 * BUDGET <= sum(len(request.prompt_token_ids) for request in claimed) < 2 * BUDGET + 100
    for request in claimed:
        engine.add_request(request)
    assert engine.claim_budget.num_wanted(0, 0) == 0 and engine.claim_budget.room > 0


def test_a_prompt_that_takes_many_steps_lets_nothing_wait_behind_it() -> None:
    engine = make_engine(FakeModelRunner(num_blocks=300), num_blocks=300, max_num_batched_tokens=64, max_model_len=1024)
    engine.add_request(make_request(600))
    engine.step()
    assert engine.claim_budget.num_wanted(0, 0) == 0
    for _ in range(7):
        engine.step()
    assert engine.claim_budget.num_wanted(0, 0) >= 1


def test_prompts_that_the_cache_has_are_counted_by_what_they_cost() -> None:
    shape: dict[str, Any] = {"max_num_seqs": 64, "max_num_batched_tokens": 128, "max_model_len": 1024}
    engine = make_engine(FakeModelRunner(num_blocks=1000), num_blocks=1000, **shape)
    prompt = make_request(120).prompt_token_ids
    for number in range(40):
        serve(engine, make_request([*prompt, number], max_tokens=2, ignore_eos=True))
    assert engine.claim_budget.num_wanted(0, 0) > 20  # of 121 tokens each, which would be three of two steps


def test_many_cached_short_prompts_make_no_long_ones_look_cheap() -> None:
    """32 long prompts of another key beside short ones that the cache has: two steps start three of them."""
    shape: dict[str, Any] = {"max_num_seqs": 64, "max_num_batched_tokens": 512, "max_model_len": 1024}
    engine = make_engine(FakeModelRunner(num_blocks=8000), num_blocks=8000, **shape)
    short = make_request(20).prompt_token_ids
    for number in range(40):
        serve(engine, make_request([*short, number], max_tokens=2, ignore_eos=True))
        if number % 8 == 0:
            serve(engine, make_request(500, max_tokens=2, ignore_eos=True))
    num_claimed = 0
    while claimed := claim_what_starts(engine, deque(make_request(500) for _ in range(32))):
        num_claimed += len(claimed)
        for request in claimed:
            engine.add_request(request)
    assert num_claimed <= 4


def test_prompts_that_are_scored_slowly_let_others_begin_beside_them() -> None:
    shape: dict[str, Any] = {"max_num_seqs": 64, "max_num_batched_tokens": 8192, "max_model_len": 8192}
    engine = make_engine(FakeModelRunner(num_blocks=100_000), num_blocks=100_000, **shape)
    for _ in range(8):
        engine.add_request(make_request(8000, prompt_logprobs=20))
    engine.step()
    assert len(claim_what_starts(engine, deque(make_request(90) for _ in range(20)))) == 20


def test_a_worker_whose_prompts_fill_its_memory_still_takes_one() -> None:
    engine = make_engine(FakeModelRunner(num_blocks=33), num_blocks=33, max_model_len=128, max_num_batched_tokens=64)
    for _ in range(20):
        serve(engine, make_request(120, max_tokens=2, ignore_eos=True))
    assert engine.claim_budget.num_wanted(0, 0) >= 1


def test_nothing_of_a_batch_is_claimed_while_others_wait() -> None:
    engine = make_engine(FakeModelRunner(), max_num_seqs=32)
    assert engine.background_claim_budget.num_wanted(0, 0) > 0
    engine.add_request(make_request(5))
    assert engine.background_claim_budget.num_wanted(0, 0) == 0


def test_only_what_has_not_begun_can_be_withdrawn_newest_first() -> None:
    engine = make_engine(FakeModelRunner(), max_num_seqs=2)
    batch = structs.replace(make_request(5, "batch"), priority_class="batch")
    for request in [*(make_request(5, name, ignore_eos=True) for name in "abcde"), batch]:
        engine.add_request(request)
    engine.step()
    assert engine.withdraw_waiting(2) == ["d", "e"]
    assert engine.withdraw_waiting(9) == ["c"]
    assert engine.withdraw_waiting(9) == []
    engine.check_integrity()
    assert engine.request_ids == {"a", "b", "batch"}


def test_of_those_named_only_what_has_not_begun_is_withdrawn() -> None:
    engine = make_engine(FakeModelRunner(), max_num_seqs=2)
    batch = structs.replace(make_request(5, "batch"), priority_class="batch")
    for request in [*(make_request(5, name, ignore_eos=True) for name in "abcd"), batch]:
        engine.add_request(request)
    engine.step()
    assert engine.withdraw({"a", "d", "batch", "unknown"}) == ["d", "batch"]
    engine.check_integrity()
    assert engine.request_ids == {"a", "b", "c"}
