"""Experts on a CPU: a loop over the experts that a step's tokens chose, in ascending order.

Each expert has the linear layers of the weight format, so a row's bits do not depend on its batch where theirs do not.
The weighted results are added in float32 in expert order.
"""

import logging
from collections.abc import Iterator
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from engine_worker.model.linear import NOTHING_QUANTIZED, ExpertsLoad, Input, Linear, LinearMethod
from engine_worker.model.quantization.dense_cpu import cpu_kernel
from engine_worker.model.quantization.expert_weights import expert_source
from engine_worker.model.quantization.router_values import router_with_shared
from engine_worker.model.weights import WeightSource
from kernels.moe.choice import choose
from kernels.scaled import Scaling

logger = logging.getLogger("worker")


def load_experts(load: ExpertsLoad, source: WeightSource, method: LinearMethod) -> "LoopedExperts":
    """Load the experts with the linear layers of `method`.

    Raises:
        ValueError: If a tensor is missing or has another shape.
    """
    weights = expert_source(load, source)
    experts = [(method.load(first, weights), method.load(down, weights)) for first, down in load.all_linears]
    return LoopedExperts(load, experts)


@cache
def log_loop() -> None:
    """Log that experts run in a loop, once for all layers."""
    logger.info("experts: a loop in torch over the chosen ones, with the linear layers of the number format")


class LoopedExperts:
    """The experts of one layer."""

    scaling = Scaling.NONE

    def __init__(self, load: ExpertsLoad, experts: list[tuple[Linear, Linear]]) -> None:
        """Hold `experts`: the first and the second layer of each expert of this rank, and of a shared one."""
        spec, router = load.spec, load.router
        self._first, self._gate = spec.experts.start, spec.gate
        self.experts, self.has_shared = experts, load.shared is not None
        self._correction = router.correction_bias
        self.router, weight = router_with_shared(load)
        bias = None if router.bias is None else F.pad(router.bias.float(), (0, len(weight) - len(router.bias)))
        self._logits = cpu_kernel(weight.float(), bias)

    def __call__(self, x: Input) -> Tensor:
        assert isinstance(x, Tensor), NOTHING_QUANTIZED
        return self.weighted_sum(x, *choose(self.logits(x), self.router, self._correction))

    def logits(self, x: Tensor) -> Tensor:
        """Return the router's logits [T, E] float32, and as a last one the gate of a shared expert."""
        return self._logits(x.float(), torch.float32)

    def weighted_sum(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Return [T, H]: of the experts `ids` [T, k] of each token in ascending order, times `weights` [T, k]."""
        chosen, sums = ids.flatten(), torch.zeros_like(x, dtype=torch.float32)
        pairs = chosen.sort(stable=True).indices  # token * k + slot, by expert
        tokens, factors = pairs // ids.shape[1], weights.flatten()[pairs, None]
        for expert, own in _by_expert(chosen, len(self.experts), self._first):
            first, down = self.experts[expert]
            outputs = down(self._activated(first, x[tokens[own]]))
            sums.index_add_(0, tokens[own], outputs.float().mul_(factors[own]))
        return sums.to(x.dtype)

    def _activated(self, first: Linear, x: Tensor) -> Tensor:
        if self._gate is None:
            return first(x).relu_().square_()
        gated = first.gated(x, self._gate)
        assert isinstance(gated, Tensor)
        return gated


def _by_expert(chosen: Tensor, num_experts: int, first: int) -> Iterator[tuple[int, slice]]:
    """Yield each hit expert of this rank in ascending order, with the place of its pairs among the sorted ones."""
    counts = chosen.bincount(minlength=first + num_experts).tolist()
    start = 0
    for expert, count in enumerate(counts[: first + num_experts]):
        if count and expert >= first:
            yield expert - first, slice(start, start + count)
        start += count
