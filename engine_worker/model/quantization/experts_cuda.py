"""Experts on CUDA: the kernels of kernels/moe with the weights of all experts in one tensor.

No launch depends on the choice of experts, so CUDA graphs can hold a step.
"""

import logging
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from engine_worker.model.linear import ExpertsLoad, Input, LinearSpec
from engine_worker.model.quantization.expert_weights import expert_source
from engine_worker.model.quantization.router_values import router_with_shared
from engine_worker.model.quantization.rows import rows_of
from engine_worker.model.specs.mlp import GateSpec
from engine_worker.model.weights import WeightSource, joined
from kernels.moe.activation import Activation, Gate, SquaredRelu
from kernels.moe.experts import apply_experts, kernel_of
from kernels.moe.list_product import is_hopper
from kernels.moe.route import route
from kernels.moe.weights import ExpertProduct, ExpertWeight, ScaledExperts
from kernels.scaled import Scaling, plain_rows

logger = logging.getLogger("worker")

OneWeight = Callable[[LinearSpec, WeightSource], tuple[Tensor, Tensor]]  # values [N, K], scales of one expert


class CudaExperts:
    """The experts of one layer."""

    def __init__(
        self, load: ExpertsLoad, source: WeightSource, read: Callable[[list[LinearSpec], WeightSource], ExpertWeight]
    ) -> None:
        """Load all experts, also a shared one; `read` makes one weight of the linear layers of all experts."""
        spec, weights = load.spec, expert_source(load, source)
        self._values, self._weight = router_with_shared(load)
        self._router, self._activation = load.router, _activation(spec.gate)
        self._owned = None if spec.owned is None else spec.experts
        self.has_shared = load.shared is not None
        products = ([first for first, _ in load.all_linears], [down for _, down in load.all_linears])
        self._first, self._down = (ExpertProduct(read(each, weights), _biases(each, weights)) for each in products)
        self.scaling = _scaling(self._first.weight)
        is_gated, on_hopper = spec.gate is not None, is_hopper(load.router.weight.device)
        _log_kernel(
            "gate and up" if is_gated else "up",
            kernel_of(self._first.weight, is_gated=is_gated, on_hopper=on_hopper),
        )
        _log_kernel("down", kernel_of(self._down.weight, is_gated=False, on_hopper=on_hopper))

    def __call__(self, x: Input) -> Tensor:
        router = self._router
        routing = route(plain_rows(x), self._weight, self._values, router.bias, router.correction_bias, self._owned)
        return apply_experts(x, routing, self._first, self._down, self._activation)


@cache
def _log_kernel(name: str, kernel: str) -> None:
    """Log the kernel of a product of experts, once for all layers."""
    logger.info("experts, %s: %s", name, kernel)


def _scaling(weight: ExpertWeight) -> Scaling:
    if not isinstance(weight, ScaledExperts):
        return Scaling.NONE
    return Scaling.GROUPS if weight.is_grouped else Scaling.ROWS


def dense_weight(linears: list[LinearSpec], source: WeightSource) -> Tensor:
    """Return [E, N, K] in 16 or 32 bits."""
    first = linears[0]
    weight = torch.empty(len(linears), sum(first.outputs), first.inputs, dtype=source.dtype, device=source.device)
    for place, linear in zip(weight, linears, strict=True):
        place.copy_(rows_of(linear, source, "weight", (linear.inputs,)))
    return weight


def scaled_weight(linears: list[LinearSpec], source: WeightSource, read: OneWeight) -> ScaledExperts:
    """Return the fp8 weights and scales that `read` makes for each expert."""
    pieces = [read(linear, source) for linear in linears]
    values = joined([values for values, _ in pieces]).view(len(pieces), *pieces[0][0].shape)
    return ScaledExperts(values, torch.stack([scales.float() for _, scales in pieces]))


def _biases(linears: list[LinearSpec], source: WeightSource) -> Tensor | None:
    """Return [E, N], or None if the layer has no bias."""
    if not linears[0].bias:
        return None
    return torch.stack([rows_of(linear, source, "bias", ()) for linear in linears])


def _activation(gate: GateSpec | None) -> Activation:
    if gate is None:
        return SquaredRelu()
    return Gate(kind=gate.kind.value, alpha=gate.alpha, limit=gate.limit, up_offset=gate.up_offset)
