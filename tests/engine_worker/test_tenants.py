"""Tenant isolation: neither cached tokens nor timing reveals what another tenant has sent."""

from dataclasses import dataclass

import msgspec
import pytest

from shared.messages import FinishEvent, TokenEvent
from tests.builders import make_engine, make_prompt, make_request

PROMPT = make_prompt(40)
STEP_TOKENS = 8  # the prompt takes five steps, a cached one fewer


@dataclass
class Seen:
    """What a client can observe of its request."""

    cached_tokens: int
    steps_to_first_token: int
    token_ids: list[int]


def ask(engine, tenant: str, salt: str = "") -> Seen:
    engine.add_request(
        msgspec.structs.replace(make_request(PROMPT, max_tokens=4, ignore_eos=True), tenant=tenant, cache_salt=salt)
    )
    token_ids: list[int] = []
    first = steps = 0
    while True:
        steps += 1
        for event in engine.step():
            if isinstance(event, TokenEvent):
                token_ids += event.token_ids
                first = first or steps
            elif isinstance(event, FinishEvent):
                return Seen(event.usage.cached_tokens, first, token_ids)
        assert steps < 100


@pytest.fixture
def engine():
    return make_engine(num_blocks=129, max_num_batched_tokens=STEP_TOKENS)


@pytest.mark.parametrize(("tenant", "salt"), [("b", ""), ("", ""), ("a", "salt"), ("ab", ""), ("", "a")])
def test_tenant_prompt_of_another_tenant_is_not_cached(engine, tenant: str, salt: str) -> None:
    cold = ask(engine, "a")
    assert (cold.cached_tokens, cold.steps_to_first_token) == (0, 5)
    assert ask(engine, tenant, salt) == cold
    again = ask(engine, "a")
    assert again.cached_tokens > 30 and again.steps_to_first_token < 5  # the same tenant is faster: the test can fail
    assert again.token_ids == cold.token_ids


def test_tenants_at_once_do_not_share_cache(engine) -> None:
    for tenant in ("a", "b"):
        request = make_request(PROMPT, max_tokens=1)
        engine.add_request(msgspec.structs.replace(request, tenant=tenant))
    ends = [event for _ in range(30) for event in engine.step() if isinstance(event, FinishEvent)]
    assert [end.usage.cached_tokens for end in ends] == [0, 0]
