"""The choice of experts in torch: for CPUs, and the reference of the kernels."""

import torch
from torch import Tensor

from kernels.moe.routing import Router

_MIN_SUM = 1e-20  # added to a sum of sigmoids, as in transformers


def choose(logits: Tensor, router: Router, correction: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Choose the experts of each token; of equal scores, the lower expert.

    Args:
        logits: [T, E], float32 or float64; with the gate of a shared expert as a last one.
        router: The rule of choice.
        correction: [E], added to the scores for the choice only.

    Returns:
        Experts [T, k] int64 in ascending order, a shared one last, and their weights [T, k] in the dtype of the logits.
    """
    routed, is_sigmoid = logits[:, : router.num_experts], router.scoring == "sigmoid"
    scores = routed.sigmoid() if is_sigmoid else routed.softmax(-1)
    ranking = scores if is_sigmoid else routed
    if correction is not None:
        ranking = ranking + correction.to(ranking.dtype)
    if router.num_groups > 1:
        ranking = _in_best_groups(ranking, router)
    best = ranking.sort(dim=-1, descending=True, stable=True).indices[:, : router.top_k]
    ids = best.sort(dim=-1).values
    weights = scores.gather(-1, ids)
    if router.divides_by_chosen:
        weights = weights / (weights.sum(-1, keepdim=True) + (_MIN_SUM if is_sigmoid else 0.0))
    return _with_shared(ids, weights * router.scale, logits, router)


def _in_best_groups(ranking: Tensor, router: Router) -> Tensor:
    """Return `ranking` without the experts outside of the groups with the largest sums of their two best."""
    groups = ranking.view(len(ranking), router.num_groups, router.num_experts // router.num_groups)
    sums = groups.topk(min(2, groups.shape[2]), dim=-1).values.sum(-1)
    best = sums.sort(dim=-1, descending=True, stable=True).indices[:, : router.num_chosen_groups]
    is_best = torch.zeros_like(sums, dtype=torch.bool).scatter_(1, best, value=True)
    return groups.masked_fill(~is_best[..., None], -torch.inf).flatten(1)


def _with_shared(ids: Tensor, weights: Tensor, logits: Tensor, router: Router) -> tuple[Tensor, Tensor]:
    if router.shared == "none":
        return ids, weights
    of_shared = logits[:, -1:].sigmoid() if router.shared == "gated" else torch.ones_like(weights[:, :1])
    return torch.cat((ids, torch.full_like(ids[:, :1], router.num_experts)), 1), torch.cat((weights, of_shared), 1)
