"""Run bench/engine/pressure_exactness.py on a CPU: preemption changes no token, and a changed token is counted."""

import pytest

from bench.engine import pressure_exactness
from bench.engine.pressure_exactness import HOST_POOLS, Outputs, compare, make_requests
from engine_worker.engine import Engine
from engine_worker.execution.step.model_runner import ModelRunner
from shared.messages import GenerationRequest
from tests.engine_worker.execution.reference import make_runner, write_model

LENGTHS = [(20 + 7 * number, 40) for number in range(8)]
SMALL = 24  # blocks of 8 tokens; the eight sequences need 77


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    return make_runner(write_model(tmp_path_factory.mktemp("tiny")), num_blocks=120, block_size=8, num_host_blocks=60)


def test_preemption_changes_no_token(runner: ModelRunner) -> None:
    figures = compare(runner, make_requests(LENGTHS, 500, seed=1), num_blocks=SMALL)
    assert (figures["requests"], figures["tokens"], figures["kv_tokens"]) == (8, 320, 184)
    assert [figures[name]["differing_requests"] for name in HOST_POOLS] == [0, 0, 0]
    assert figures["swap"]["preemptions"]["swap"] > 0 and figures["swap"]["recomputed_tokens"] == 0
    assert figures["recompute"]["preemptions"]["recompute"] > 0


def test_changed_token_is_counted(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    right = pressure_exactness.run

    def wrong_from_the_second_on(engine: Engine, requests: list[GenerationRequest]) -> Outputs:
        outputs = right(engine, requests)
        outputs["3"][-1] += engine.stats().kv_cache.num_blocks == SMALL - 1
        return outputs

    monkeypatch.setattr(pressure_exactness, "run", wrong_from_the_second_on)
    figures = compare(runner, make_requests(LENGTHS, 500, seed=1), num_blocks=SMALL)
    assert [figures[name]["differing_requests"] for name in HOST_POOLS] == [1, 1, 1]
