"""A mixture of experts with its shared expert: an MLP of a layer."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from engine_worker.model.linear import Experts, ExpertsLoad, Input, RouterWeights, Scaling
from engine_worker.model.parts.mlp import DenseMlp, load_dense_mlp
from engine_worker.model.parts.source import LayerSource
from engine_worker.model.specs.experts import ExpertsSpec, RouterSpec, shared_names
from engine_worker.model.tensor_parallel import SINGLE
from kernels.moe.shared_gate import add_gated


class MixtureOfExperts:
    """The weighted sum of each token's experts, plus the shared expert."""

    scaling: Scaling = Scaling.NONE  # the router reads the inputs unquantized

    def __init__(
        self,
        experts: Experts,
        shared: DenseMlp | None,
        shared_gate: Tensor | None,
        reduce: Callable[[Tensor], Tensor],
    ) -> None:
        """Hold the parts; `shared_gate` is [H], and `reduce` sums over the ranks."""
        self._experts, self._shared, self._shared_gate, self._reduce = experts, shared, shared_gate, reduce

    def __call__(self, x: Input) -> Tensor:
        assert isinstance(x, Tensor)
        outputs = self._experts(x)
        if self._shared is not None and self._shared_gate is not None:
            outputs = add_gated(outputs, self._shared(x), x, self._shared_gate)
        elif self._shared is not None:
            outputs = outputs + self._shared(x)
        return self._reduce(outputs)


def load_mixture(spec: ExpertsSpec, source: LayerSource) -> MixtureOfExperts:
    """Load a mixture of experts.

    Raises:
        ValueError: If a tensor is missing or has another shape.
    """
    names, hidden = source.names, source.norm.size
    load = ExpertsLoad(
        spec=spec,
        router=_router(spec.router, source),
        names=names.experts,
        prefix=source.prefix,
        hidden=hidden,
        has_down_bias=spec.bias,
    )
    experts = source.method.experts(load, source.weights)
    shared = gate = None
    if spec.shared is not None:
        shared = load_dense_mlp(spec.shared, replace(source, names=shared_names(names), is_summed=False))
    if spec.shared_gate:
        gate = source.weights.get(f"{source.prefix}{names.experts.shared_gate}.weight", (1, hidden)).flatten()
    return MixtureOfExperts(experts, shared, gate, source.reduce if source.is_summed else SINGLE.all_reduce)


def _router(spec: RouterSpec, source: LayerSource) -> RouterWeights:
    weights, shape, names = source.weights, (spec.num_experts,), source.names.experts
    name, correction = source.prefix + names.router, source.prefix + names.correction_bias
    return RouterWeights(
        weights.get(f"{name}.weight", (*shape, source.norm.size)),
        weights.get(f"{name}.bias", shape) if spec.bias else None,
        # float32, because choices near a tie depend on it.
        weights.get(correction, shape, dtype=torch.float32) if spec.correction_bias else None,
    )
