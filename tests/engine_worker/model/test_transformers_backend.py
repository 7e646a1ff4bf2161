"""Decoders without a file of their own here: run by transformers, with this engine's attention, KV and weights.

As of the families that have one, greedy tokens in float32 are those of transformers by itself: in one batch, in chunks,
preempted by swap and by recompute, forked, with prefix hits. What attention here cannot do is refused by name.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from engine_worker.model.implementation import blueprint, blueprint_from_directory
from engine_worker.model.transformers_backend.library import ModelNotServed
from tests.engine_worker.execution.reference import TINY
from tests.engine_worker.model.families import check_schedules, write_family
from tests.engine_worker.model.family_cases import REFUSED, THROUGH_TRANSFORMERS, Case

CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=THROUGH_TRANSFORMERS)
def model_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_family(tmp_path_factory.mktemp("model"), THROUGH_TRANSFORMERS[request.param])


def test_greedy_tokens_are_those_of_transformers_whatever_the_schedule(model_dir: Path) -> None:
    assert blueprint_from_directory(model_dir).implementation == "transformers"
    check_schedules(model_dir)


def test_a_family_runs_the_same_either_way(tmp_path: Path) -> None:
    directory = write_family(tmp_path, Case("llama", {"attention_bias": True}))
    assert blueprint_from_directory(directory).implementation == "native"
    assert check_schedules(directory, "native") == check_schedules(directory, "transformers")
    native, other = (blueprint_from_directory(directory, wanted).shape for wanted in ("native", "transformers"))
    fields = ("vocab_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "max_position_embeddings", "dtype")
    assert {name: getattr(native, name) for name in fields} == {name: getattr(other, name) for name in fields}
    assert native.num_parameters() == other.num_parameters()
    assert native.eos_token_ids == other.eos_token_ids


@pytest.mark.parametrize(
    ("model_type", "changes", "named"),
    REFUSED,
)
def test_what_attention_here_cannot_do_is_refused_before_weights(
    model_type: str, changes: dict[str, Any], named: str
) -> None:
    config = {**TINY, "head_dim": None, "pad_token_id": 0, "model_type": model_type, **changes}
    with pytest.raises(ModelNotServed) as refusal:
        blueprint({key: value for key, value in config.items() if value is not None or key in changes}, {})
    assert named in str(refusal.value)
    assert len(str(refusal.value)) < 400
