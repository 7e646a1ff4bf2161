"""A shared expert that is computed as one of the others, on a CPU and on CUDA, gives what an MLP beside them gives."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from zlib import crc32

import pytest
import torch
from torch import Tensor

from engine_worker.model.layers import NormShape
from engine_worker.model.linear import Experts, ExpertsLoad, Linear, LinearSpec
from engine_worker.model.parts.experts import load_mixture
from engine_worker.model.parts.source import LayerSource
from engine_worker.model.quantization import linear_method
from engine_worker.model.quantization.experts_cuda import CudaExperts, dense_weight
from engine_worker.model.specs.experts import ExpertsSpec, RouterSpec
from engine_worker.model.specs.mlp import MlpSpec
from engine_worker.model.specs.names import EXPERTS as SEPARATE
from engine_worker.model.specs.names import ExpertNames, NamesSpec
from engine_worker.model.weight_format import DENSE
from engine_worker.model.weights import RandomWeights, WeightSource

HIDDEN, INNER, NUM_EXPERTS = 32, 16, 5
SPEC = ExpertsSpec(
    router=RouterSpec(num_experts=NUM_EXPERTS, top_k=2, scale=1.5),
    inner=INNER,
    shared=MlpSpec(intermediate_size=INNER),
    shared_gate=True,
)
STACKED = replace(SEPARATE, gate_up=("mlp.experts.gate_up_proj",), down="mlp.experts.down_proj")
CPU = linear_method(DENSE, "cpu")


class Method:
    """Linear layers of a CPU, and given experts."""

    def __init__(self, experts: Callable[[ExpertsLoad, WeightSource], Experts]) -> None:
        self.experts, self.loaded = experts, list[tuple[str, ...]]()

    def load(self, spec: LinearSpec, source: WeightSource) -> Linear:
        self.loaded.append(spec.names)
        return CPU.load(spec, source)

    def head(self, weight: Tensor, name: str, source: WeightSource) -> Any:
        raise NotImplementedError("a mixture has no head")


def beside(load: ExpertsLoad, source: WeightSource) -> Experts:
    """Leave the shared expert to the mixture."""
    return CPU.experts(replace(load, shared=None), source)


def as_on_cuda(load: ExpertsLoad, source: WeightSource) -> Experts:
    """Compute all experts with the references of the kernels."""
    return CudaExperts(load, source, dense_weight)


class Named(RandomWeights):
    """Random tensors that depend on their names."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"), torch.float32)

    def get(self, name: str, shape: tuple[int, ...], *options: Any, **named: Any) -> Tensor:
        return torch.randn(shape, generator=torch.Generator().manual_seed(crc32(name.encode()))) * 0.3


def layer_source(method: Method) -> LayerSource:
    norm = NormShape(HIDDEN, 1e-6)
    return LayerSource(Named(), method, NamesSpec(), "layer.", norm, {}, 0, range(0))


def outputs(spec: ExpertsSpec, names: ExpertNames, method: Method) -> Tensor:
    x = torch.randn(7, HIDDEN, generator=torch.Generator().manual_seed(9))
    return load_mixture(spec, replace(layer_source(method), names=NamesSpec(experts=names)))(x)


@pytest.mark.parametrize("experts", [CPU.experts, as_on_cuda], ids=["CPU", "CUDA"])
@pytest.mark.parametrize("shared_gate", [False, True])
@pytest.mark.parametrize("names", [SEPARATE, STACKED], ids=["separate", "stacked"])
def test_shared_expert_as_one_of_the_others_equals_an_mlp(
    names: ExpertNames, shared_gate: bool, experts: Callable[[ExpertsLoad, WeightSource], Experts]
) -> None:
    spec, method = replace(SPEC, shared_gate=shared_gate), Method(experts)
    expected = outputs(spec, names, Method(beside))
    torch.testing.assert_close(outputs(spec, names, method), expected, rtol=1e-5, atol=1e-5)  # other orders of sums
    assert not method.loaded


@pytest.mark.parametrize(
    "spec",
    [
        replace(SPEC, shared=MlpSpec(intermediate_size=2 * INNER)),
        replace(SPEC, shared=MlpSpec(intermediate_size=INNER, bias=True)),
        replace(SPEC, owned=(0, NUM_EXPERTS)),
    ],
    ids=["other size", "bias", "ranks share experts"],
)
def test_another_shared_expert_is_an_mlp(spec: ExpertsSpec) -> None:
    method = Method(as_on_cuda)
    expected = outputs(spec, SEPARATE, Method(beside))
    torch.testing.assert_close(outputs(spec, SEPARATE, method), expected, rtol=1e-5, atol=1e-5)
    assert len(method.loaded) == 2


def test_shared_expert_of_another_format_is_left_out() -> None:
    loads = list[ExpertsLoad]()

    def recorded(load: ExpertsLoad, source: WeightSource) -> Experts:
        loads.append(load)
        return CPU.experts(load, source)

    load_mixture(SPEC, layer_source(Method(recorded)))
    load = loads[0]
    assert load.in_one_format(lambda name: 4).shared is load.shared
    assert load.in_one_format(lambda name: 16 if "shared" in name else 4).shared is None
