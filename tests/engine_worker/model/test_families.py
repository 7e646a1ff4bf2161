"""Every family of networks against transformers: tiny random models, greedy in fp32, through the whole engine.

The configurations cross what families differ in: biases, tied heads, norms of queries and keys, partial, neighbouring
and absent rotation, fused tensors, factors, odd numbers of heads. The scheduler's freedoms (chunks, preemption by swap
and by recompute, forks, prefix hits) change nothing that is generated.
"""

from pathlib import Path

import pytest

from engine_worker.model.architectures import MODULES
from tests.engine_worker.model.families import check_schedules, write_family
from tests.engine_worker.model.family_cases import NATIVE


@pytest.fixture(scope="module", params=NATIVE)
def family_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_family(tmp_path_factory.mktemp("family"), NATIVE[request.param])


def test_every_family_is_tried() -> None:
    assert {case.model_type for case in NATIVE.values()} == set(MODULES)


def test_greedy_tokens_are_those_of_transformers_whatever_the_schedule(family_dir: Path) -> None:
    check_schedules(family_dir)
