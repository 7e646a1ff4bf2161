"""Check the kernels of mixtures of experts on a GPU against float64, for the same bits in a batch, and for races."""

import torch
from torch import Tensor

from bench.kernel.cases import Check, Error, measure_error, poisoned, rounding_tolerance, same_bits
from bench.kernel.expert_layers import GPT_OSS, QWEN3, QWEN3_INT4, QWEN35_MOE, ExpertLayer, ExpertModel, random_layer
from bench.kernel.fp8_checks import random_weight as random_fp8_weight
from kernels.fp8_quantize import quantize_groups, quantize_rows
from kernels.moe.activation import Gate, SquaredRelu, activated_reference, num_halves
from kernels.moe.choice import choose
from kernels.moe.combine import combine
from kernels.moe.grouped_product import grouped_product, scaled_tiles_of, tiles_of
from kernels.moe.reference import apply_experts_reference, sort_reference
from kernels.moe.route import route
from kernels.moe.routing import Router, Routing
from kernels.moe.weights import ExpertProduct, ScaledExperts

# One token, both forms of the router and of the rows, an uneven last block, and blocks of 128 rows.
ROWS = (1, 7, 16, 40, 300)
SMALL = {
    "small bf16": ExpertModel(192, 128, Router(num_experts=5, top_k=2), Gate(kind="gelu_tanh"), "bf16", has_bias=True),
    "small squared relu": ExpertModel(192, 128, Router(num_experts=5, top_k=2), SquaredRelu(), "bf16", has_bias=True),
    "small shared": ExpertModel(192, 128, Router(num_experts=5, top_k=2, shared="plain"), Gate(), "bf16"),
    "small mxfp4": ExpertModel(128, 192, Router(num_experts=3, top_k=1), Gate(), "mxfp4"),
    "small awq": ExpertModel(192, 160, Router(num_experts=5, top_k=2), Gate(kind="gelu_tanh"), "awq", has_bias=True),
    "small awq squared relu": ExpertModel(192, 160, Router(num_experts=5, top_k=2), SquaredRelu(), "awq"),
}

CHECKED = {
    **SMALL,
    "gpt-oss-20b mxfp4": GPT_OSS,
    "qwen3-30b-a3b bf16": QWEN3,
    "qwen3-30b-a3b int4": QWEN3_INT4,
    "qwen3.5-35b-a3b bf16": QWEN35_MOE,
}


def check_experts(model: ExpertModel, num_rows: int) -> Check:
    def check(generator: torch.Generator) -> list[Error]:
        layer = random_layer(model, generator)
        x = torch.randn(num_rows, model.hidden, dtype=torch.bfloat16, device=generator.device, generator=generator)
        routing = poisoned(lambda: layer.route(x))
        output = poisoned(lambda: layer.apply(x, routing))
        exact = apply_experts_reference(x.double(), routing, layer.first, layer.down, model.activation)
        # Gate, up, their product and each expert's result are rounded, besides the sum.
        errors = [measure_error(output, exact, 4 * rounding_tolerance(torch.bfloat16)), *_routing_errors(layer, x)]
        for row in (0, num_rows // 2, num_rows - 1):
            alone = x[row : row + 1]
            errors.append(same_bits(layer.apply(alone, layer.route(alone)), output[row : row + 1]))
        errors += [same_bits(layer.apply(x, layer.route(x)), output) for _ in range(5)]
        if model.format == "bf16":
            errors.append(same_bits(_by_groups(layer, x, routing), output))
        return errors

    return check


def _routing_errors(layer: ExpertLayer, x: Tensor) -> list[Error]:
    """Compare weights with float64, and lists with those of the same ids."""
    found = layer.route(x)
    router, logits = layer.model.router, x.double() @ layer.router_weight.double().T
    if layer.router_bias is not None:
        logits[:, : router.num_experts] += layer.router_bias.double()
    # Logits closer than their error may be exchanged: weights are compared in descending order.
    _, weights = choose(logits, router)
    found_weights, exact_weights = (
        values.sort(dim=-1, descending=True).values.double() for values in (found.weights, weights)
    )
    expected = sort_reference(x, found.ids.long(), found.weights, router)
    used = int(expected.num_blocks)
    return [
        measure_error(found_weights, exact_weights, 1e-4),
        *(
            same_bits(getattr(found, name), getattr(expected, name))
            for name in ("pairs", "offsets", "positions", "num_blocks")
        ),
        same_bits(found.blocks[:used, :3], expected.blocks[:used, :3]),
    ]


def _by_groups(layer: ExpertLayer, x: Tensor, routing: Routing) -> Tensor:
    """Compute the layer by the form for every device."""
    activation = layer.model.activation
    tiles = tiles_of(num_halves(activation) == 2, routing.block_rows, 2)
    activated = grouped_product(x, layer.first, routing, activation, tiles, x.dtype)
    plain = grouped_product(activated, layer.down, routing, None, tiles_of(False, routing.block_rows, 2), x.dtype)
    return combine(plain, routing)


def check_fp8_product(num_rows: int, is_gated: bool, is_grouped: bool) -> Check:
    """Compare a product of fp8 weights and quantized rows with the exact product of the same operands."""

    def check(generator: torch.Generator) -> list[Error]:
        router, num_inputs, num_outputs = Router(num_experts=9, top_k=2), 768, 256 if is_gated else 128
        x = torch.randn(num_rows, num_inputs, dtype=torch.bfloat16, device=generator.device, generator=generator)
        routing = route(x, torch.randn(9, num_inputs, device=x.device, generator=generator).bfloat16(), router)
        weights = [random_fp8_weight(num_outputs, num_inputs, is_grouped, generator) for _ in range(9)]
        scaled = ScaledExperts(*(torch.stack([getattr(w, name) for w in weights]) for name in ("values", "scales")))
        rows = x if is_gated else x[routing.pairs.long() // 2]
        quantized = quantize_groups(rows) if is_grouped else quantize_rows(rows)
        gate = Gate() if is_gated else None

        def run() -> Tensor:
            tiles = scaled_tiles_of(is_gated, scaled, routing)
            return grouped_product(quantized, ExpertProduct(scaled), routing, gate, tiles, x.dtype)

        output = poisoned(run)
        of_pairs = quantized.exact_rows().double()
        of_pairs = of_pairs[routing.pairs.long() // 2] if is_gated else of_pairs
        offsets, weight = routing.offsets.tolist(), scaled.exact_weight().double()
        exact = torch.cat([of_pairs[offsets[e] : offsets[e + 1]] @ weight[e].T for e in range(9)])
        exact = exact if gate is None else activated_reference(exact, gate)
        return [measure_error(output, exact, 2 * rounding_tolerance(torch.bfloat16)), same_bits(run(), output)]

    return check


def expert_checks() -> dict[str, Check]:
    fp8 = {
        f"experts fp8 {'gated' if is_gated else 'plain'} {'blocks' if is_grouped else 'rows'} T={num_rows}": (
            check_fp8_product(num_rows, is_gated, is_grouped)
        )
        for num_rows in (1, 40, 300)
        for is_gated in (False, True)
        for is_grouped in (False, True)
    }
    return fp8 | {
        f"experts {name} T={num_rows}": check_experts(model, num_rows)
        for name, model in CHECKED.items()
        for num_rows in ROWS
    }
