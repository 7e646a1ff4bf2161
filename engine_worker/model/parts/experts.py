"""A mixture of experts with its shared expert: an MLP of a layer.

A method may compute a shared expert as one of the others. Otherwise it is an MLP of its own.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from engine_worker.model.linear import Experts, ExpertsLoad, Input, RouterWeights, SharedExpert
from engine_worker.model.parts.mlp import DenseMlp, linears_of, load_dense_mlp
from engine_worker.model.parts.source import LayerSource
from engine_worker.model.specs.experts import ExpertsSpec, RouterSpec, shared_names
from engine_worker.model.specs.mlp import MlpSpec
from engine_worker.model.tensor_parallel import SINGLE
from kernels.moe.shared_gate import add_gated
from kernels.scaled import plain_rows
from kernels.side_stream import side_by_side


class MixtureOfExperts:
    """The weighted sum of each token's experts, plus the shared expert."""

    reads_plain = True  # by the router

    def __init__(
        self,
        experts: Experts,
        shared: DenseMlp | None,
        shared_gate: Tensor | None,
        reduce: Callable[[Tensor], Tensor],
    ) -> None:
        """Hold the parts; `shared_gate` is [H], and `reduce` sums over the ranks."""
        self._experts, self._shared, self._shared_gate, self._reduce = experts, shared, shared_gate, reduce
        self.scaling = experts.scaling

    def __call__(self, x: Input) -> Tensor:
        if self._shared is None:
            return self._reduce(self._experts(x))
        plain = plain_rows(x)
        of_shared = x if self._shared.scaling is self.scaling else plain
        outputs, shared = side_by_side(partial(self._experts, x), partial(self._shared, of_shared), plain.device)
        if self._shared_gate is None:
            return self._reduce(outputs + shared)
        return self._reduce(add_gated(outputs, shared, plain, self._shared_gate))


def load_mixture(spec: ExpertsSpec, source: LayerSource) -> MixtureOfExperts:
    """Load a mixture of experts.

    Raises:
        ValueError: If a tensor is missing or has another shape.
    """
    names, hidden = source.names, source.norm.size
    gate = None
    if spec.shared_gate:
        gate = source.weights.get(f"{source.prefix}{names.experts.shared_gate}.weight", (1, hidden)).flatten()
    of_shared = replace(source, names=shared_names(names), is_summed=False)
    load = ExpertsLoad(
        spec=spec,
        router=_router(spec.router, source),
        names=names.experts,
        prefix=source.prefix,
        hidden=hidden,
        has_down_bias=spec.bias,
        shared=_shared_like_others(spec, gate, of_shared),
    )
    experts = source.method.experts(load, source.weights)
    shared = None
    if spec.shared is not None and not experts.has_shared:
        shared = load_dense_mlp(spec.shared, of_shared)
    return MixtureOfExperts(experts, shared, gate, source.reduce if source.is_summed else SINGLE.all_reduce)


def _shared_like_others(spec: ExpertsSpec, gate: Tensor | None, source: LayerSource) -> SharedExpert | None:
    """Return the shared expert if it differs from the others in its weights only, and each rank has a part of all."""
    if spec.bias or spec.owned is not None or spec.shared != MlpSpec(intermediate_size=spec.inner, gate=spec.gate):
        return None
    return SharedExpert(linears_of(spec.shared, source), gate)


def _router(spec: RouterSpec, source: LayerSource) -> RouterWeights:
    weights, shape, names = source.weights, (spec.num_experts,), source.names.experts
    name, correction = source.prefix + names.router, source.prefix + names.correction_bias
    return RouterWeights(
        weights.get(f"{name}.weight", (*shape, source.norm.size)),
        weights.get(f"{name}.bias", shape) if spec.bias else None,
        # float32, because choices near a tie depend on it.
        weights.get(correction, shape, dtype=torch.float32) if spec.correction_bias else None,
    )
