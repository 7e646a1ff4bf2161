"""The router and the experts in plain torch: the reference of the kernels, and the form for CPUs."""

import torch
from torch import Tensor

from kernels.moe.activation import Activation, activated_reference
from kernels.moe.choice import choose
from kernels.moe.routing import Router, Routing, empty_routing
from kernels.moe.weights import ExpertProduct, exact_weight


def route_reference(
    x: Tensor,
    weight: Tensor,
    router: Router,
    bias: Tensor | None = None,
    correction_bias: Tensor | None = None,
    owned: range | None = None,
) -> Routing:
    """Choose the experts of x [T, H] in float32, or in float64 if x is; see route()."""
    exact = torch.promote_types(x.dtype, torch.float32)
    logits = x.to(exact) @ weight.to(exact).T
    if bias is not None:
        logits[:, : router.num_experts] += bias.to(exact)
    ids, weights = choose(logits, router, correction_bias)
    return sort_reference(x, ids, weights.float(), router, owned)


def sort_reference(x: Tensor, ids: Tensor, weights: Tensor, router: Router, owned: range | None = None) -> Routing:
    """Return the routing of given experts: ids [T, k], ascending, and float32 weights [T, k]."""
    routing = empty_routing(x, router, owned)
    num_pairs, block_rows = routing.num_pairs, routing.block_rows
    pairs = ids.flatten().sort(stable=True).indices
    counts = ids.flatten().bincount(minlength=len(routing.offsets) - 1)
    offsets = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    positions = torch.empty_like(pairs).scatter_(0, pairs, torch.arange(num_pairs, device=x.device))
    blocks = [
        [expert - routing.owned.start, first, end, 0]
        for expert in routing.owned
        for end in (int(offsets[expert + 1]),)
        for first in range(int(offsets[expert]), end, block_rows)
    ]
    routing.ids.copy_(ids)
    routing.weights.copy_(weights)
    routing.pairs.copy_(pairs)
    routing.offsets.copy_(offsets)
    routing.positions.copy_(positions.view(ids.shape))
    routing.blocks.zero_()
    routing.blocks[: len(blocks)] = torch.tensor(blocks, dtype=torch.int32, device=x.device).view(-1, 4)
    routing.num_blocks.fill_(len(blocks))
    return routing


def apply_experts_reference(
    x: Tensor, routing: Routing, first: ExpertProduct, down: ExpertProduct, activation: Activation
) -> Tensor:
    """Add the chosen experts in ascending order, in float32 or float64; see apply_experts()."""
    exact = torch.promote_types(x.dtype, torch.float32)
    sums = torch.zeros_like(x, dtype=exact)
    for expert in routing.owned:
        tokens, slots = (routing.ids == expert).nonzero(as_tuple=True)
        if len(tokens):
            local = expert - routing.owned.start
            activated = activated_reference(_linear(x[tokens], first, local), activation)
            weights = routing.weights[tokens, slots, None].to(exact)
            sums.index_add_(0, tokens, _linear(activated, down, local).to(exact) * weights)
    return sums.to(x.dtype)


def _linear(x: Tensor, product: ExpertProduct, expert: int) -> Tensor:
    """Return the product of one expert, rounded to the dtype of x."""
    exact = torch.promote_types(x.dtype, torch.float32)
    result = x.to(exact) @ exact_weight(product.weight, expert).to(exact).T
    if product.bias is not None:
        result += product.bias[expert].to(exact)
    return result.to(x.dtype)
