"""Run the soak on an engine without a device: all traffic finishes, and a lost or repeated token is detected."""

import random

import pytest

from bench.engine.soak import Soak
from engine_worker.engine import Engine
from shared.messages import TokenEvent
from tests.builders import FakeModelRunner, make_engine


def soak(engine: Engine) -> Soak:
    return Soak(engine, random.Random(1), max_prompt_tokens=40, max_output_tokens=20, last_token_id=999)


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["in_turn", "ahead"])
def test_soak_traffic_ends_and_preempts(async_scheduling: bool) -> None:
    engine = make_engine(
        FakeModelRunner(num_blocks=40, block_size=4), num_blocks=40, block_size=4, async_scheduling=async_scheduling
    )
    traffic = soak(engine)
    for _ in range(400):
        traffic.step()
    traffic.drain()
    assert engine.stats().kv_totals.copied_blocks > 0  # beams and choices copy blocks
    assert traffic.ends["length"] > 20 and traffic.ends["aborted"] > 5
    assert sum(engine.stats().counters.preemptions.values()) > 0


def test_repeated_token_is_detected() -> None:
    traffic = soak(make_engine())
    while not any(traffic.num_tokens.values()):
        traffic.step()
    request_id = next(name for name, tokens in traffic.num_tokens.items() if tokens)
    with pytest.raises(AssertionError, match="after"):
        traffic._take(TokenEvent(request_id, 0, [5]))
    with pytest.raises(KeyError):
        traffic._take(TokenEvent("ended", 0, [5]))
