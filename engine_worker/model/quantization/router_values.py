"""A router as the kernels of every device take it: its values, and its weight with the gate of a shared expert."""

import torch
from torch import Tensor

from engine_worker.model.linear import ExpertsLoad
from engine_worker.model.specs.experts import RouterSpec
from kernels.moe.routing import Router, Shared


def router_of(spec: RouterSpec, shared: Shared = "none") -> Router:
    """Return the values of `spec`; its biases are weights."""
    return Router(
        num_experts=spec.num_experts,
        top_k=spec.top_k,
        scoring=spec.scoring.value,
        renormalize=spec.renormalize,
        scale=spec.scale,
        num_groups=spec.num_groups,
        num_chosen_groups=spec.num_chosen_groups,
        shared=shared,
    )


def shared_of(load: ExpertsLoad) -> Shared:
    """Return how the shared expert is weighted, if it is one of the others."""
    if load.shared is None:
        return "none"
    return "plain" if load.shared.gate is None else "gated"


def router_weight(load: ExpertsLoad) -> Tensor:
    """Return [E, H], and as a last row the gate of a shared expert that is one of the others."""
    weight = load.router.weight
    if load.shared is None or load.shared.gate is None:
        return weight
    return torch.cat((weight, load.shared.gate[None]))
