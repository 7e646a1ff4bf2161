"""The experts of a layer: a product with an activation, a plain product, the weighted sum."""

import torch
from torch import Tensor

from kernels.fp8_quantize import quantize_groups, quantize_rows
from kernels.moe.activation import Activation, Gate
from kernels.moe.combine import combine
from kernels.moe.gather import gather_rows
from kernels.moe.grouped_product import grouped_product, scaled_tiles_of, tiles_of
from kernels.moe.int4_product import int4_product, int4_tiles_of
from kernels.moe.list_product import is_hopper, list_product, list_tiles_of, max_listed_tokens, reads_tokens
from kernels.moe.mxfp4 import Mxfp4Experts
from kernels.moe.reference import apply_experts_reference
from kernels.moe.routing import Routing
from kernels.moe.weights import ExpertProduct, ExpertWeight, Int4Experts, ScaledExperts
from kernels.scaled import Scaled, plain_rows


def apply_experts(
    x: Tensor | Scaled, routing: Routing, first: ExpertProduct, down: ExpertProduct, activation: Activation
) -> Tensor:
    """Apply the owned experts of each token and add their weighted results in ascending expert order.

    Args:
        x: [T, H], contiguous; for fp8 weights it may be quantized.
        routing: From route() of the same tokens.
        first: Weight of I outputs and H inputs; with a gate, of 2 * I outputs, gate rows first.
        down: Weight of H outputs and I inputs.
        activation: Between the two.

    Returns:
        [T, H], dtype of plain x. With split weights, this rank's part of the sum.
    """
    plain = plain_rows(x)
    if plain.is_cuda:
        return apply_experts_triton(x, routing, first, down, activation)
    return apply_experts_reference(plain, routing, first, down, activation)


def apply_experts_triton(
    x: Tensor | Scaled, routing: Routing, first: ExpertProduct, down: ExpertProduct, activation: Activation
) -> Tensor:
    activated = _product(x, first, routing, activation)
    return combine(_product(activated, down, routing, None), routing)


def kernel_of(weight: ExpertWeight, *, is_gated: bool, on_hopper: bool) -> str:
    """Name the kernels that serve a weight with activations in bfloat16."""
    if isinstance(weight, Mxfp4Experts):
        return "list kernel, MXFP4 dequantized in registers"
    if isinstance(weight, ScaledExperts):
        return "grouped product in fp8"
    if isinstance(weight, Int4Experts):
        return "grouped product, 4-bit integers dequantized in registers"
    num_tokens = max_listed_tokens(weight, is_gated) if on_hopper else 0
    return f"list kernel up to {num_tokens} tokens, then grouped product" if num_tokens else "grouped product"


def _product(x: Tensor | Scaled, product: ExpertProduct, routing: Routing, activation: Activation | None) -> Tensor:
    weight, is_gated = product.weight, isinstance(activation, Gate)
    if isinstance(weight, ScaledExperts):
        return _product_of_scaled(x, weight, product, routing, activation)
    x = plain_rows(x)
    if isinstance(weight, Int4Experts):
        tiles_of_int4 = int4_tiles_of(is_gated, routing.block_rows, weight.group, x.element_size())
        return int4_product(x, product, routing, activation, tiles_of_int4)
    tiles = list_tiles_of(weight, is_gated, routing) if x.dtype == torch.bfloat16 and is_hopper(x.device) else None
    if tiles is not None:
        rows = gather_rows(x, routing) if activation is not None and not reads_tokens(routing) else x
        return list_product(rows, product, routing, activation, tiles)
    if isinstance(weight, Mxfp4Experts):
        raise ValueError("MXFP4 experts need a Hopper GPU (sm_90) and bfloat16 activations")
    grouped_tiles = tiles_of(is_gated, routing.block_rows, x.element_size())
    return grouped_product(x, product, routing, activation, grouped_tiles, x.dtype)


def _product_of_scaled(
    x: Tensor | Scaled, weight: ScaledExperts, product: ExpertProduct, routing: Routing, activation: Activation | None
) -> Tensor:
    quantize = quantize_groups if weight.is_grouped else quantize_rows
    rows = x if isinstance(x, Scaled) else quantize(x)
    tiles = scaled_tiles_of(isinstance(activation, Gate), weight, routing)
    return grouped_product(rows, product, routing, activation, tiles, plain_rows(x).dtype)
