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
from engine_worker.model.specs.experts import RouterSpec, Scoring
from engine_worker.model.weights import WeightSource
from kernels.moe.routing import with_shared
from kernels.scaled import Scaling

logger = logging.getLogger("worker")

_MIN_SUM = 1e-20  # added to a sum of sigmoids, as in transformers


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
        self._spec, self._correction = spec.router, router.correction_bias
        self.router, weight = router_with_shared(load)
        bias = None if router.bias is None else F.pad(router.bias.float(), (0, len(weight) - len(router.bias)))
        self._logits = cpu_kernel(weight.float(), bias)

    def __call__(self, x: Input) -> Tensor:
        assert isinstance(x, Tensor), NOTHING_QUANTIZED
        logits = self.logits(x)
        chosen = choose(logits[:, : self._spec.num_experts], self._spec, self._correction)
        return self.weighted_sum(x, *with_shared(*chosen, logits, self.router))

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


def choose(logits: Tensor, router: RouterSpec, correction: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Choose the experts of each token; of equal scores, the lower expert.

    Args:
        logits: [T, E], float32.
        router: The values of the router.
        correction: [E], added to the scores for the choice only.

    Returns:
        Experts [T, k] int64 in ascending order, and their weights [T, k] float32.
    """
    is_sigmoid = router.scoring is Scoring.SIGMOID
    scores = logits.sigmoid() if is_sigmoid else logits.softmax(-1)
    ranking = scores if is_sigmoid else logits
    if correction is not None:
        ranking = ranking + correction
    if router.num_groups > 1:
        ranking = _in_best_groups(ranking, router)
    best = ranking.sort(dim=-1, descending=True, stable=True).indices[:, : router.top_k]
    ids = best.sort(dim=-1).values
    weights = scores.gather(-1, ids)
    if router.renormalize or router.scoring is Scoring.SOFTMAX_OF_CHOSEN:
        weights = weights / (weights.sum(-1, keepdim=True) + (_MIN_SUM if is_sigmoid else 0.0))
    return ids, weights * router.scale


def _in_best_groups(ranking: Tensor, router: RouterSpec) -> Tensor:
    """Return `ranking` without the experts outside of the groups with the largest sums of their two best."""
    groups = ranking.view(len(ranking), router.num_groups, -1)
    sums = groups.topk(min(2, groups.shape[2]), dim=-1).values.sum(-1)
    best = sums.sort(dim=-1, descending=True, stable=True).indices[:, : router.num_chosen_groups]
    is_best = torch.zeros_like(sums, dtype=torch.bool).scatter_(1, best, value=True)
    return groups.masked_fill(~is_best[..., None], -torch.inf).flatten(1)


def _by_expert(chosen: Tensor, num_experts: int, first: int) -> Iterator[tuple[int, slice]]:
    """Yield each hit expert of this rank in ascending order, with the place of its pairs among the sorted ones."""
    counts = chosen.bincount(minlength=first + num_experts).tolist()
    start = 0
    for expert, count in enumerate(counts[: first + num_experts]):
        if count and expert >= first:
            yield expert - first, slice(start, start + count)
        start += count
