"""The values of a router as the kernels of every device take them."""

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
