"""What a worker claims: enough that no step idles while requests are queued, and no more than steps can start."""

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

pytestmark = pytest.mark.timeout(600)  # long simulations

Claim = Callable[[Engine, deque[GenerationRequest]], list[GenerationRequest]]
BUDGET, SLOTS, BLOCKS = 128, 16, 1600


def claim_what_starts(engine: Engine, queue: deque[GenerationRequest]) -> list[GenerationRequest]:
    """Claim as the worker does: repeatedly during a step, counting requests already claimed."""
    claimed: list[GenerationRequest] = []
    while queue and (taken := take(engine.claim_budget, claimed, queue)):
        claimed += taken
    return claimed


def take(
    claim_budget: ClaimBudget, claimed: list[GenerationRequest], queue: deque[GenerationRequest]
) -> list[GenerationRequest]:
    """Take requests as the TAKE script does."""
    num_on_way, tokens_on_way = len(claimed), sum(len(request.prompt_token_ids) for request in claimed)
    most, enough_tokens = (
        claim_budget.max_requests(num_on_way, tokens_on_way),
        claim_budget.num_wanted_tokens(tokens_on_way),
    )
    taken = list[GenerationRequest]()
    while queue and len(taken) < most and sum(len(request.prompt_token_ids) for request in taken) < enough_tokens:
        taken.append(queue.popleft())
    return taken


def claim_all_slots(engine: Engine, queue: deque[GenerationRequest]) -> list[GenerationRequest]:
    """Claim the previous way: all that slots and blocks allow, once nothing waits."""
    stats = engine.stats()
    num_slots = min(SLOTS - stats.num_running, stats.kv_cache.num_available_blocks - stats.num_running - 1)
    return [queue.popleft() for _ in range(min(num_slots, len(queue)))] if not stats.num_waiting else []


def serve(engine: Engine, request: GenerationRequest) -> None:
    """Run one request alone to its end."""
    engine.add_request(request)
    while engine.has_work:
        engine.step()


class Served:
    """A queue and an engine; each claim takes as long as the step that runs at the same time."""

    def __init__(self, claim: Claim, *, ahead: bool) -> None:
        self.num_steps = 0
        self.had_work = False  # whether the queue had requests when this step was scheduled
        self.most_waiting = 0
        self.idle_steps: list[str] = []
        self.claim = claim
        shape: dict[str, Any] = {"num_blocks": BLOCKS + 1, "block_size": 4}
        self.engine = make_engine(
            FakeModelRunner(before_step=self._look_for_idle_capacity, **shape),
            **shape,
            max_num_seqs=SLOTS,
            max_num_batched_tokens=BUDGET,
            max_model_len=256,
            enable_prefix_caching=False,  # a hit is not predictable and would leave budget unused
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
        """Record steps with unused budget and slots while requests are queued; blocks suffice for every slot."""
        num_tokens, num_running = sum(one.num_new_tokens for one in batch.sequences), self.engine.stats().num_running
        if self.had_work and num_tokens < BUDGET and num_running < SLOTS:
            self.idle_steps.append(f"step {self.num_steps}: {num_tokens} tokens, {num_running} slots")


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
def test_claim_budget_no_step_idles_while_requests_are_queued(kind: str, ahead: bool) -> None:
    for seed in range(5):
        served = Served(claim_what_starts, ahead=ahead)
        served.run(traffic(kind, seed))
        assert served.idle_steps == []


@pytest.mark.parametrize("kind", ["short", "long", "mixed"])
def test_claim_budget_saturated_needs_no_more_steps_than_greedy(kind: str) -> None:
    now = before = 0
    for seed in range(5):
        for claim in (claim_what_starts, claim_all_slots):
            served = Served(claim, ahead=True)
            served.run(traffic(kind, seed))
            now += served.num_steps * (claim is claim_what_starts)
            before += served.num_steps * (claim is claim_all_slots)
    assert before / now >= 0.99


def test_claim_budget_leaves_in_queue_what_cannot_start_soon() -> None:
    """300 prompts of 100 tokens with free slots: a step computes 1.28 of them."""
    engine = Served(claim_what_starts, ahead=True).engine
    queue = deque(make_request(100) for _ in range(300))
    claimed = claim_what_starts(engine, queue)
    assert 2 * BUDGET <= sum(len(request.prompt_token_ids) for request in claimed) < 2 * BUDGET + 100
    for request in claimed:
        engine.add_request(request)
    assert engine.claim_budget.num_wanted(0, 0) == 0 and engine.claim_budget.room > 0


def test_claim_budget_long_prompt_stops_claims_until_its_end() -> None:
    engine = make_engine(FakeModelRunner(num_blocks=300), num_blocks=300, max_num_batched_tokens=64, max_model_len=1024)
    engine.add_request(make_request(600))
    engine.step()
    assert engine.claim_budget.num_wanted(0, 0) == 0
    for _ in range(7):
        engine.step()
    assert engine.claim_budget.num_wanted(0, 0) >= 1


def test_claim_budget_cached_prompts_count_by_computed_tokens() -> None:
    shape: dict[str, Any] = {"max_num_seqs": 64, "max_num_batched_tokens": 128, "max_model_len": 1024}
    engine = make_engine(FakeModelRunner(num_blocks=1000), num_blocks=1000, **shape)
    prompt = make_request(120).prompt_token_ids
    for number in range(40):
        serve(engine, make_request([*prompt, number], max_tokens=2, ignore_eos=True))
    assert engine.claim_budget.num_wanted(0, 0) > 20  # of 121 tokens each; uncached, two steps would compute three


def test_claim_budget_cached_short_prompts_do_not_discount_long() -> None:
    """32 long prompts of another key beside cached short ones: two steps start three of them."""
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


def test_claim_budget_slow_prompt_logprobs_let_others_begin() -> None:
    shape: dict[str, Any] = {"max_num_seqs": 64, "max_num_batched_tokens": 8192, "max_model_len": 8192}
    engine = make_engine(FakeModelRunner(num_blocks=100_000), num_blocks=100_000, **shape)
    for _ in range(8):
        engine.add_request(make_request(8000, prompt_logprobs=20))
    engine.step()
    assert len(claim_what_starts(engine, deque(make_request(90) for _ in range(20)))) == 20


def test_claim_budget_full_memory_still_claims_one() -> None:
    engine = make_engine(FakeModelRunner(num_blocks=33), num_blocks=33, max_model_len=128, max_num_batched_tokens=64)
    for _ in range(20):
        serve(engine, make_request(120, max_tokens=2, ignore_eos=True))
    assert engine.claim_budget.num_wanted(0, 0) >= 1


def test_claim_budget_batch_is_not_claimed_while_others_wait() -> None:
    engine = make_engine(FakeModelRunner(), max_num_seqs=32)
    assert engine.background_claim_budget.num_wanted(0, 0) > 0
    engine.add_request(make_request(5))
    assert engine.background_claim_budget.num_wanted(0, 0) == 0


def test_withdraw_waiting_takes_newest_unstarted_first() -> None:
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


def test_withdraw_named_takes_only_unstarted() -> None:
    engine = make_engine(FakeModelRunner(), max_num_seqs=2)
    batch = structs.replace(make_request(5, "batch"), priority_class="batch")
    for request in [*(make_request(5, name, ignore_eos=True) for name in "abcd"), batch]:
        engine.add_request(request)
    engine.step()
    assert engine.withdraw({"a", "d", "batch", "unknown"}) == ["d", "batch"]
    engine.check_integrity()
    assert engine.request_ids == {"a", "b", "c"}


def test_claim_budget_counts_recurrent_states() -> None:
    """Three states for 16 slots: other workers of the queue get the other requests."""
    sizes: dict[str, Any] = {"num_blocks": BLOCKS, "num_state_blocks": 4}
    engine = make_engine(FakeModelRunner(**sizes), **sizes, max_num_seqs=SLOTS, eos_token_ids=())
    assert engine.claim_budget.room == 3
    engine.add_request(make_request(5, max_tokens=9, ignore_eos=True))
    engine.step()
    assert engine.claim_budget.room == 2
    serve(engine, make_request(7, max_tokens=2, ignore_eos=True))
    assert engine.claim_budget.room == 3, "a checkpoint gives way to a new sequence"
