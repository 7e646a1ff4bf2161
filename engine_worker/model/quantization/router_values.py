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


def router_with_shared(load: ExpertsLoad) -> tuple[Router, Tensor]:
    """Return the values of a router and its weight [E, H].

    If the shared expert is one of the others and has a gate, that is the last row of the weight.
    """
    spec, weight, shared = load.spec.router, load.router.weight, load.shared
    if shared is None or shared.gate is None:
        return router_of(spec, "none" if shared is None else "plain"), weight
    return router_of(spec, "gated"), torch.cat((weight, shared.gate[None]))
