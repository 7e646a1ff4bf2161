"""Every family against transformers: tiny random models, greedy in float32, through the whole engine.

The configurations combine what families differ in: biases, tied heads, query and key norms, partial, interleaved and
absent rotation, fused tensors, scale factors, odd head counts. Chunks, preemption by swap and by recompute, forks and
prefix hits do not change the generated tokens.
"""

from pathlib import Path

import pytest
import torch

from engine_worker.model.architectures import MODULES
from tests.engine_worker.model import hidden_states
from tests.engine_worker.model.families import check_schedules, write_family
from tests.engine_worker.model.family_cases import NATIVE


@pytest.fixture(scope="module", params=NATIVE)
def family_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_family(tmp_path_factory.mktemp("family"), NATIVE[request.param])


def test_every_family_has_a_case() -> None:
    assert {case.model_type for case in NATIVE.values()} == set(MODULES)


def test_every_layer_matches_transformers(family_dir: Path) -> None:
    prompts = [[(7 * index * index + start) % 1000 for index in range(21)] for start in (3, 34, 65, 96)]
    found, expected = hidden_states.ours(family_dir, prompts), hidden_states.of_transformers(family_dir, prompts)
    assert len(found) == len(expected) >= 2
    exact = hidden_states.of_transformers(family_dir, prompts, torch.float64)
    for ours, theirs, true in zip(found, expected, exact, strict=True):
        # Float32 sums in another order, which recurrent layers amplify most: at most 5e-5 (Qwen3.5), mostly 2e-6.
        assert deviation(ours - theirs) <= 1e-4 * theirs.std()
        # The difference is rounding: both are equally far from the library's float64, but for chance, which takes
        # Nemotron-H to 2.6 times the library's error and Qwen3.5 to 0.35.
        assert deviation(ours - true) <= 3 * deviation(theirs - true)


def deviation(errors: torch.Tensor) -> float:
    return float(errors.square().mean().sqrt())


def test_greedy_tokens_match_transformers_in_any_schedule(family_dir: Path) -> None:
    check_schedules(family_dir)
