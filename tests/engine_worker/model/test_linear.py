"""A network's linear layers use only what its LinearMethod loaded, so a new weight format is one file."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from engine_worker.model.architectures import spec_from_directory
from engine_worker.model.linear import Experts, ExpertsLoad, Input, Linear, LinearSpec, Split
from engine_worker.model.network import Network
from engine_worker.model.quantization import linear_method
from engine_worker.model.quantization.dense_cpu import CpuHead
from engine_worker.model.specs.mlp import SILU, GateSpec
from engine_worker.model.specs.part import Role
from engine_worker.model.weight_format import DENSE
from engine_worker.model.weights import RandomWeights, WeightSource
from engine_worker.scheduling.batch import ScheduledBatch, ScheduledSequence
from kernels.scaled import Scaling
from tests.builders import make_sequence
from tests.engine_worker.execution.reference import write_model
from tests.engine_worker.execution.reference_inputs import reference_model_input

CPU = torch.device("cpu")
BLOCK_SIZE = 8


class Int8Linear:
    """Rows of int8 with one scale each."""

    scaling = Scaling.NONE

    def __init__(self, weight: Tensor) -> None:
        self._scale = weight.abs().amax(dim=1, keepdim=True) / 127
        self._weight = (weight / self._scale).round().to(torch.int8)

    def __call__(self, x: Input) -> Tensor:
        assert isinstance(x, Tensor)
        return F.linear(x, self._weight * self._scale)

    def gated(self, x: Input, gate: GateSpec, scaling: Scaling = Scaling.NONE) -> Tensor:
        assert gate == SILU
        gates, up = self(x).chunk(2, dim=-1)
        return F.silu(gates) * up


class Int8Method:
    def __init__(self) -> None:
        self.loaded: list[LinearSpec] = []

    def load(self, spec: LinearSpec, source: WeightSource) -> Linear:
        self.loaded.append(spec)
        parts = [(name, size) for name, size in zip(spec.names, spec.outputs, strict=True)]
        return Int8Linear(torch.cat([source.get(f"{name}.weight", (size, spec.inputs)) for name, size in parts]))

    def experts(self, load: ExpertsLoad, source: WeightSource) -> Experts:
        raise NotImplementedError("the model of this test has no experts")

    def head(self, weight: Tensor, name: str, source: WeightSource) -> CpuHead:
        return CpuHead(weight)


def logits_of(model: Network) -> Tensor:
    config, sequence = model.spec, make_sequence(30, "one prompt")
    sequence.kv.tables[0].blocks = [3, 1, 2, 4]
    pool = torch.zeros(8, config.num_layers, 2, config.num_kv_heads, BLOCK_SIZE, config.head_dim)
    batch = ScheduledBatch([ScheduledSequence(sequence, 0, 30, samples=True)])
    return model.forward(reference_model_input(batch, BLOCK_SIZE), model.attach(pool))


def test_new_weight_format_needs_only_a_linear_method(tmp_path: Path) -> None:
    spec, method = spec_from_directory(write_model(tmp_path)), Int8Method()
    dense = logits_of(Network(spec, RandomWeights(CPU, torch.float32), max_len=64))
    stored = logits_of(Network(spec, RandomWeights(CPU, torch.float32), max_len=64, method=method))
    assert not torch.equal(dense, stored)
    # int8 weights have an error of 1 / 254 of a row's largest, which is about 3 deviations.
    assert float((dense - stored).std()) < 0.05 * float(dense.std())
    assert [linear.role for linear in method.loaded] == [Role.QKV, Role.OUT, Role.GATE_UP, Role.DOWN] * spec.num_layers
    linear_elements = sum(sum(linear.outputs) * linear.inputs for linear in method.loaded)
    norms = spec.hidden_size * (2 * spec.num_layers + 1)
    embeddings = spec.vocab_size * spec.hidden_size * (1 if spec.tie_word_embeddings else 2)
    assert linear_elements == spec.num_parameters() - norms - embeddings


@pytest.mark.parametrize(
    ("names", "outputs"), [(("fused",), (4, 2, 2)), (("q", "k", "v"), (4, 2, 2))], ids=["fused", "apart"]
)
def test_rows_and_biases_follow_the_requested_order(names: tuple[str, ...], outputs: tuple[int, ...]) -> None:
    order = torch.tensor([1, 0, 3, 2, 5, 4, 6, 7])
    spec: dict[str, Any] = {"role": Role.QKV, "names": names, "outputs": outputs, "inputs": 16, "bias": True}
    method = linear_method(DENSE, "cpu")
    plain = method.load(LinearSpec(**spec), RandomWeights(CPU, torch.float32))
    ordered = method.load(LinearSpec(**spec, row_order=order), RandomWeights(CPU, torch.float32))
    x = torch.randn(3, 16, generator=torch.Generator().manual_seed(0))
    assert torch.equal(ordered(x), plain(x)[:, order])


def test_row_parallel_layers_are_summed_over_ranks() -> None:
    spec: dict[str, Any] = {"names": ("a",), "outputs": (8,), "inputs": 8, "bias": False}
    splits = {role: LinearSpec(role=role, **spec).split for role in Role if role is not Role.HEAD}
    assert [role for role, split in splits.items() if split is Split.INPUTS] == [Role.OUT, Role.DOWN]


def test_kernel_of_a_linear_layer_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """No other test uses this width; on a CPU the tiles of a GPU are not reported."""
    method, source = linear_method(DENSE, "cuda"), RandomWeights(CPU, torch.float32)
    caplog.set_level("INFO", logger="worker")
    for index in range(3):
        names = (f"{index}.gate", f"{index}.up")
        method.load(LinearSpec(role=Role.GATE_UP, names=names, outputs=(41, 41), inputs=43, bias=False), source)
    method.head(torch.zeros(47, 43), "head", source)
    assert caplog.messages == ["gate_up, 82 x 43: library kernel", "head, 47 x 43: library kernel"]
