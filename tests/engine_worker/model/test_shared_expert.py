"""A shared expert that is computed as one of the others gives what an MLP beside them gives."""

from dataclasses import replace
from typing import Any

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


class TogetherMethod:
    """Linear layers of a CPU, and experts in one tensor as on CUDA, with the kernels' references."""

    def __init__(self) -> None:
        self.loaded: list[tuple[str, ...]] = []

    def load(self, spec: LinearSpec, source: WeightSource) -> Linear:
        self.loaded.append(spec.names)
        return CPU.load(spec, source)

    def experts(self, load: ExpertsLoad, source: WeightSource) -> Experts:
        return CudaExperts(load, source, dense_weight)

    def head(self, weight: Tensor, name: str, source: WeightSource) -> Any:
        raise NotImplementedError("a mixture has no head")


class Remembered(RandomWeights):
    """The same random tensor for each request of a name."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"), torch.float32)
        self._remembered: dict[str, Tensor] = {}

    def get(self, name: str, shape: tuple[int, ...], *options: Any, **named: Any) -> Tensor:
        if name not in self._remembered:
            generator = torch.Generator().manual_seed(len(self._remembered))
            self._remembered[name] = torch.randn(shape, generator=generator) * 0.3
        assert self._remembered[name].shape == shape
        return self._remembered[name]


def mixtures(spec: ExpertsSpec, names: ExpertNames) -> tuple[Tensor, Tensor, TogetherMethod]:
    """Return the outputs with the experts of a CPU and with those of CUDA, whose method is returned too."""
    weights, together = Remembered(), TogetherMethod()
    x = torch.randn(7, HIDDEN, generator=torch.Generator().manual_seed(9))
    source = LayerSource(
        weights=weights,
        method=CPU,
        names=NamesSpec(experts=names),
        prefix="layer.",
        norm=NormShape(HIDDEN, 1e-6),
        tables={},
        index=0,
        cache_layers=range(0),
    )
    beside = load_mixture(spec, source)(x)
    return beside, load_mixture(spec, replace(source, method=together))(x), together


@pytest.mark.parametrize("shared_gate", [False, True])
@pytest.mark.parametrize("names", [SEPARATE, STACKED], ids=["separate", "stacked"])
def test_shared_expert_as_one_of_the_others_equals_an_mlp(names: ExpertNames, shared_gate: bool) -> None:
    beside, found, method = mixtures(replace(SPEC, shared_gate=shared_gate), names)
    torch.testing.assert_close(found, beside, rtol=1e-5, atol=1e-5)  # float32 in other orders
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
    beside, found, method = mixtures(spec, SEPARATE)
    torch.testing.assert_close(found, beside, rtol=1e-5, atol=1e-5)
    assert len(method.loaded) == 2


def test_shared_expert_of_another_format_is_left_out() -> None:
    loads = list[ExpertsLoad]()

    class Recording(TogetherMethod):
        def experts(self, load: ExpertsLoad, source: WeightSource) -> Experts:
            loads.append(load)
            return super().experts(load, source)

    source = LayerSource(Remembered(), Recording(), NamesSpec(), "layer.", NormShape(HIDDEN, 1e-6), {}, 0, range(0))
    load_mixture(SPEC, source)
    load = loads[0]
    assert load.in_one_format(lambda name: 4).shared is load.shared
    assert load.in_one_format(lambda name: 16 if "shared" in name else 4).shared is None
