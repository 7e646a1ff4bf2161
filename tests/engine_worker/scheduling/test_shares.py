"""Fair shares of slots and KV blocks: a tenant below its share gets a slot, and no slot stays idle."""

from collections import Counter
from typing import Any

import pytest
from msgspec import structs

from engine_worker.engine import Engine
from shared.messages import TokenEvent
from tests.builders import FakeModelRunner, Transcript, expected_output, make_engine, make_request, run_to_end

SHAPE: dict[str, Any] = {"num_blocks": 2001, "block_size": 16}
NUM_WAITING = 4  # waiting requests per tenant


class Service:
    """An engine whose tenants always have waiting requests."""

    def __init__(self, **options: Any) -> None:
        shape = {name: options.pop(name, value) for name, value in SHAPE.items()}
        config = {"max_num_seqs": 64, "max_num_batched_tokens": 512, "max_model_len": 2048, **options}
        self.runner = FakeModelRunner(**shape)
        self.engine: Engine = make_engine(self.runner, **shape, **config)
        self.num_tokens = Counter[str]()
        self.step_number = 0
        self.first_tokens: dict[str, int] = {}  # request id -> step
        self._tenants: dict[str, str] = {}

    def add(self, tenant: str, prompt: int, *, weight: float = 1.0, max_running: int = 0, **sampling: Any) -> str:
        request = structs.replace(
            make_request(prompt, f"{tenant}{len(self._tenants)}", **{"ignore_eos": True, **sampling}),
            tenant=tenant,
            tenant_weight=weight,
            tenant_max_running=max_running,
        )
        self._tenants[request.request_id] = tenant
        self.engine.add_request(request)
        return request.request_id

    def step(self, num_steps: int = 1) -> None:
        for _ in range(num_steps):
            for event in self.engine.step():
                if isinstance(event, TokenEvent):
                    self.num_tokens[self._tenants[event.request_id]] += len(event.token_ids)
                    self.first_tokens.setdefault(event.request_id, self.step_number)
            self.engine.check_integrity()
            self.step_number += 1

    def run(self, weights: dict[str, float], num_steps: int, **sampling: Any) -> None:
        """Keep requests of different lengths waiting for each tenant."""
        for _ in range(num_steps):
            waiting = Counter(group.tenant.name for group in self.engine._scheduler._policy)
            for tenant, weight in weights.items():
                for _ in range(NUM_WAITING - waiting[tenant]):
                    length = 20 + 7 * len(self._tenants) % 50
                    self.add(tenant, 30, weight=weight, **{"max_tokens": length, **sampling})
            self.step()

    def held(self) -> Counter[str]:
        running = self.engine._scheduler._running.values()
        return Counter(group.tenant.name for group in running for _ in group.active)


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize(
    ("num_requests", "sampling"),
    [(200, {}), (80, {"n": 8}), (3, {"use_beam_search": True, "beam_width": 32, "n": 1})],
    ids=["requests", "parallel_samples", "beams"],
)
def test_shares_key_gets_token_when_another_holds_all_slots(
    num_requests: int, sampling: dict[str, Any], async_scheduling: bool
) -> None:
    service = Service(async_scheduling=async_scheduling)
    for _ in range(num_requests):
        service.add("a", 30, max_tokens=1500, **sampling)
    service.step(30)
    assert service.held()["a"] == 64
    added_at = service.step_number
    request_id = service.add("b", 30, max_tokens=1)
    service.step(6)
    assert service.first_tokens[request_id] - added_at < 2 + async_scheduling  # async events come a step later


def test_shares_key_gets_token_when_another_holds_all_blocks() -> None:
    service = Service(num_blocks=401)
    for _ in range(20):
        service.add("a", 480, max_tokens=1000)
    service.step(60)
    added_at = service.step_number
    request_id = service.add("b", 100, max_tokens=1)
    service.step(5)
    assert service.first_tokens[request_id] - added_at <= 2


def test_shares_weights_divide_the_tokens() -> None:
    service = Service()
    weights = {"a": 1.0, "b": 2.0, "c": 4.0}
    service.run(weights, 1500)
    total = sum(service.num_tokens.values())
    for tenant, weight in weights.items():
        assert service.num_tokens[tenant] / total == pytest.approx(weight / 7, rel=0.05)


def test_shares_equal_keys_with_different_lengths_are_even() -> None:
    """One key has long answers. The other has short ones that free their slots constantly."""
    service = Service()
    for _ in range(64):
        service.add("a", 30, max_tokens=1800)
    service.step(20)
    before = service.num_tokens.copy()
    for _ in range(1000):
        while sum(group.tenant.name == "b" for group in service.engine._scheduler._policy) < NUM_WAITING:
            service.add("b", 10, max_tokens=15)
        service.step()
    got = service.num_tokens - before
    assert got["b"] / got["a"] == pytest.approx(1.0, rel=0.1)


def test_shares_unused_slots_go_to_other_keys() -> None:
    service = Service()
    for _ in range(80):
        service.add("a", 30, max_tokens=1500)
    service.add("b", 30, max_tokens=1500)
    service.step(30)
    assert service.held() == {"a": 63, "b": 1}


def test_shares_two_keys_keep_throughput() -> None:
    """Compare with the same requests of one key: fairness costs unfilled steps and recomputed tokens."""
    figures = {}
    for tenants in ("a", "ab"):
        service = Service()
        service.run(dict.fromkeys(tenants, 1.0), 600)
        figures[tenants] = sum(service.num_tokens.values())
    assert figures["ab"] / figures["a"] >= 0.95


def test_shares_max_running_limits_only_its_key() -> None:
    service = Service()
    for _ in range(5):
        service.add("a", 30, max_tokens=20, n=3, temperature=1.0, max_running=2)
    later = service.add("b", 30, max_tokens=1)
    for _ in range(30):
        service.step()
        assert service.held()["a"] <= 2
    assert service.first_tokens[later] == 0
    service.step(400)
    assert not service.engine.has_work and service.num_tokens["a"] == 5 * 3 * 20


def test_shares_max_running_starts_next_when_one_ends() -> None:
    service = Service()
    service.add("a", 30, max_tokens=10, max_running=1)
    second = service.add("a", 30, max_tokens=10, max_running=1)
    service.step(20)
    assert service.first_tokens[second] == 10


def test_shares_preempted_sequence_keeps_its_tokens() -> None:
    engine = make_engine(FakeModelRunner(num_blocks=400), num_blocks=400, max_num_seqs=4)
    requests = [structs.replace(make_request(9, f"a{n}", max_tokens=30, ignore_eos=True), tenant="a") for n in range(6)]
    requests += [
        structs.replace(make_request(9, f"b{n}", max_tokens=30, ignore_eos=True), tenant="b") for n in range(4)
    ]
    transcript = Transcript()
    for request in requests[:6]:
        engine.add_request(request)
    for _ in range(5):
        transcript.add(engine.step())
    for request in requests[6:]:
        engine.add_request(request)
    run_to_end(engine, transcript)
    assert engine.stats().counters.preemptions["recompute"] == 2
    assert {request.request_id: expected_output(request) for request in requests} == transcript.tokens
