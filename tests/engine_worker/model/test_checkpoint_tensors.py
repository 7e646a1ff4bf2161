"""checkpoint_tensors() lists the tensors that a network of each family reads."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine_worker.model.architectures import spec_from_directory
from engine_worker.model.checkpoint_tensors import checkpoint_tensors
from engine_worker.model.network import Network
from engine_worker.model.specs.part import Part
from engine_worker.model.weights import RandomWeights
from tests.engine_worker.model.families import write_family
from tests.engine_worker.model.family_cases import NATIVE


class _Recorded(RandomWeights):
    def __init__(self) -> None:
        super().__init__(torch.device("cpu"), torch.float32)
        self.read: dict[str, tuple[int, ...]] = {}

    def get(
        self, name: str, shape: tuple[int, ...], part: Part | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        assert name not in self.read
        self.read[name] = shape
        return super().get(name, shape, part, dtype)


@pytest.mark.parametrize("name", NATIVE)
def test_expected_tensors_match_the_network(name: str, tmp_path: Path) -> None:
    spec, weights = spec_from_directory(write_family(tmp_path, NATIVE[name])), _Recorded()
    Network(spec, weights, max_len=8)
    assert checkpoint_tensors(spec) == weights.read
