"""The Triton kernels of mixtures of experts against float64."""

from typing import Any

import pytest
import torch

from bench.kernel.cases import measure_error, rounding_tolerance
from kernels.fp8_kv import E4M3
from kernels.moe.activation import Activation, Gate, SquaredRelu, activated_reference, num_halves
from kernels.moe.choice import choose
from kernels.moe.experts import apply_experts_triton, kernel_of
from kernels.moe.grouped_product import grouped_product, scaled_tiles_of
from kernels.moe.mxfp4 import pack_mxfp4
from kernels.moe.reference import (
    apply_experts_reference,
    route_reference,
    sort_reference,
)
from kernels.moe.route import route_triton
from kernels.moe.routing import Router, Routing
from kernels.moe.weights import ExpertProduct, Int4Experts, ScaledExperts, pack_int4
from kernels.scaled import quantize_groups_reference, quantize_rows_reference

ROUTERS = {
    "softmax": Router(num_experts=12, top_k=3),
    "renormalized": Router(num_experts=32, top_k=8, renormalize=True),
    "softmax_of_chosen": Router(num_experts=5, top_k=4, scoring="softmax_of_chosen"),
    "top_1": Router(num_experts=7, top_k=1),
    "sigmoid": Router(num_experts=20, top_k=2, scoring="sigmoid", renormalize=True, scale=2.5),
    "groups": Router(
        num_experts=24, top_k=4, scoring="sigmoid", renormalize=True, scale=1.5, num_groups=6, num_chosen_groups=2
    ),
    "shared": Router(num_experts=16, top_k=3, scoring="sigmoid", scale=1.5, shared="plain"),
    "gated shared": Router(num_experts=16, top_k=3, renormalize=True, shared="gated"),
}
ACTIVATIONS: dict[str, Activation] = {
    "silu": Gate(),
    "gelu": Gate(kind="gelu_tanh"),
    "clamped": Gate(alpha=1.702, limit=1.0, up_offset=1.0),
    "squared relu": SquaredRelu(),
}


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def used_blocks(routing: Routing) -> list[list[int]]:
    return routing.blocks[: int(routing.num_blocks), :3].tolist()


def assert_same_lists(found: Routing, expected: Routing) -> None:
    for name in ("ids", "pairs", "offsets", "positions"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
    assert used_blocks(found) == used_blocks(expected)


@pytest.mark.parametrize("router", ROUTERS.values(), ids=ROUTERS)
@pytest.mark.parametrize("num_tokens", [1, 3, 20, 50])
def test_route_equals_the_reference(router: Router, num_tokens: int) -> None:
    x, weight = random(num_tokens, 72), random(router.num_logits, 72, seed=1) * 0.2
    bias = random(router.num_experts, seed=2)
    correction = random(router.num_experts, seed=3) * 0.1 if router.scoring == "sigmoid" else None
    found = route_triton(x, weight, router, bias, correction)
    logits = x.double() @ weight.double().T
    logits[:, : router.num_experts] += bias.double()
    ids, weights = choose(logits, router, correction)
    assert_same_lists(found, sort_reference(x, ids, weights.float(), router))
    assert torch.allclose(found.weights.double(), weights, rtol=1e-5)


@pytest.mark.parametrize("num_tokens", [2, 40])
def test_route_of_ties_takes_the_lower_id(num_tokens: int) -> None:
    router = Router(num_experts=9, top_k=4, renormalize=True)
    logits = torch.tensor([1.0, 3.0, 1.0, -0.0, 0.0, 1.0, 1.0, -1.0, 1.0])
    found = route_triton(torch.ones(num_tokens, 1), logits[:, None], router)
    assert found.ids.tolist() == [[0, 1, 2, 5]] * num_tokens
    low = route_triton(-torch.ones(num_tokens, 1), logits[:, None], Router(num_experts=9, top_k=2))
    assert low.ids.tolist() == [[3, 7]] * num_tokens


def test_route_has_the_same_bits_in_any_batch() -> None:
    router = Router(num_experts=9, top_k=4, renormalize=True, shared="gated")
    x, weight = random(520, 72), random(10, 72, seed=1)
    together = route_triton(x, weight, router)
    for num_tokens in (3, 40):
        found = route_triton(x[:num_tokens], weight, router)
        assert torch.equal(found.ids, together.ids[:num_tokens])
        assert torch.equal(found.weights, together.weights[:num_tokens])


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("num_tokens", [4, 40])
def test_route_of_nan_keeps_ids_in_range(num_tokens: int) -> None:
    router = Router(num_experts=9, top_k=4)
    x = random(num_tokens, 16)
    x[1] = torch.nan
    found = route_triton(x, random(9, 16), router)
    assert found.ids[1].tolist() == [0, 1, 2, 3]
    assert sorted(found.pairs.tolist()) == list(range(num_tokens * 4))


@pytest.mark.parametrize("num_tokens", [6, 70])
def test_route_lists_blocks_of_owned_experts_only(num_tokens: int) -> None:
    router = Router(num_experts=8, top_k=2)
    x, weight = random(num_tokens, 16), random(8, 16, seed=1)
    found = route_triton(x, weight, router, owned=range(2, 5))
    assert_same_lists(found, route_reference(x, weight, router, owned=range(2, 5)))
    assert {block[0] for block in used_blocks(found)} <= {0, 1, 2}


def experts(
    router: Router, hidden: int, inner: int, dtype: torch.dtype, has_bias: bool, activation: Activation
) -> list[Any]:
    outputs = num_halves(activation) * inner
    num_experts = router.num_experts + router.num_shared
    weights = random(num_experts, outputs, hidden, seed=4), random(num_experts, hidden, inner, seed=5)
    biases = [random(*weight.shape[:2], seed=6).to(dtype) if has_bias else None for weight in weights]
    return [
        ExpertProduct((weight * weight.shape[2] ** -0.5).to(dtype), bias)
        for weight, bias in zip(weights, biases, strict=True)
    ]


@pytest.mark.parametrize("activation", ACTIVATIONS.values(), ids=ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("num_tokens", "hidden", "inner"), [(1, 64, 96), (5, 40, 33), (40, 96, 64)])
def test_experts_equal_float64(
    num_tokens: int, hidden: int, inner: int, dtype: torch.dtype, activation: Activation
) -> None:
    router = Router(num_experts=6, top_k=2, renormalize=True, shared="gated")
    x = random(num_tokens, hidden).to(dtype)
    first, down = experts(router, hidden, inner, dtype, activation != Gate(), activation)
    routing = route_triton(x, random(7, hidden, seed=1).to(dtype), router)
    found = apply_experts_triton(x, routing, first, down, activation)
    exact = apply_experts_reference(x.double(), routing, first, down, activation)
    # Gate, up, their product and each expert's result are rounded, besides the sum.
    error = measure_error(found, exact, 4 * rounding_tolerance(dtype))
    assert error.passed, error


def test_experts_of_two_owners_add_to_all() -> None:
    router = Router(num_experts=6, top_k=3, renormalize=True)
    x = random(9, 64)
    gate_up, down = experts(router, 64, 64, torch.float32, has_bias=True, activation=Gate())
    whole = apply_experts_triton(x, route_triton(x, random(6, 64, seed=1), router), gate_up, down, Gate())
    parts = torch.zeros_like(whole)
    for owned in (range(4), range(4, 6)):
        own_gate_up, own_down = [
            ExpertProduct(product.weight[owned.start : owned.stop], product.bias[owned.start : owned.stop])
            for product in (gate_up, down)
        ]
        parts += apply_experts_triton(
            x, route_triton(x, random(6, 64, seed=1), router, owned=owned), own_gate_up, own_down, Gate()
        )
    assert torch.allclose(parts, whole, rtol=1e-5, atol=1e-5)


def test_experts_rows_do_not_depend_on_other_rows() -> None:
    router = Router(num_experts=4, top_k=2, renormalize=True)
    x, weight = random(40, 64), random(4, 64, seed=1)
    gate_up, down = experts(router, 64, 64, torch.float32, has_bias=False, activation=Gate())
    together = apply_experts_triton(x, route_triton(x, weight, router), gate_up, down, Gate())
    for row in (0, 7, 39):
        alone = x[row : row + 1]
        routing = route_triton(alone, weight, router)
        assert torch.equal(apply_experts_triton(alone, routing, gate_up, down, Gate())[0], together[row])


@pytest.mark.parametrize("is_grouped", [False, True])
@pytest.mark.parametrize("activation", [None, Gate(), SquaredRelu()])
def test_fp8_product_equals_float64(activation: Activation | None, is_grouped: bool) -> None:
    router = Router(num_experts=3, top_k=2)
    x = random(5, 256)
    routing = route_triton(x, random(3, 256, seed=1), router)
    rows = x if activation else x[routing.pairs.long() // 2]
    quantized = quantize_groups_reference(rows) if is_grouped else quantize_rows_reference(rows)
    scales = random(3, 2, 2).abs() + 0.1 if is_grouped else random(3, 256).abs()
    scaled = ScaledExperts(random(3, 256, 256, seed=2).to(E4M3), scales)
    product = ExpertProduct(scaled)
    tiles = scaled_tiles_of(num_halves(activation) == 2, scaled, routing)
    found = grouped_product(quantized, product, routing, activation, tiles, torch.float32)
    exact_rows = quantized.exact_rows().double()
    of_pairs = exact_rows[routing.pairs.long() // 2] if activation else exact_rows
    weight = scaled.exact_weight().double()
    offsets = routing.offsets.tolist()
    exact = torch.cat([of_pairs[offsets[expert] : offsets[expert + 1]] @ weight[expert].T for expert in range(3)])
    exact = activated_reference(exact, activation) if activation else exact
    error = measure_error(found, exact, rounding_tolerance(torch.float32))
    assert error.passed, error


@pytest.mark.parametrize("group", [32, 128])
@pytest.mark.parametrize("has_zeros", [False, True])
@pytest.mark.parametrize("activation", [Gate(limit=1.0, up_offset=1.0), Gate(kind="gelu_tanh"), SquaredRelu()])
def test_int4_experts_equal_float64_and_do_not_depend_on_other_rows(
    activation: Activation, has_zeros: bool, group: int
) -> None:
    router = Router(num_experts=3, top_k=2)
    x, of_router = random(19, 128), random(3, 128, seed=1)
    first, down = (
        ExpertProduct(int4_experts(3, outputs, 128, group, has_zeros), random(3, outputs, seed=outputs))
        for outputs in (num_halves(activation) * 128, 128)
    )
    found = apply_experts_triton(x, route_triton(x, of_router, router), first, down, activation)
    exact = apply_experts_reference(x.double(), route_triton(x, of_router, router), first, down, activation)
    error = measure_error(found, exact, 4 * rounding_tolerance(torch.float32))
    assert error.passed, error
    alone = x[7:8]
    routing = route_triton(alone, of_router, router)
    assert torch.equal(apply_experts_triton(alone, routing, first, down, activation)[0], found[7])


def int4_experts(num_experts: int, outputs: int, inputs: int, group: int, has_zeros: bool) -> Int4Experts:
    generator = torch.Generator().manual_seed(outputs)
    shape = (num_experts, outputs, inputs)
    values = torch.randint(16, shape, generator=generator, dtype=torch.uint8)
    of_groups = (num_experts, inputs // group, outputs)
    scales = (
        torch.rand(of_groups, generator=generator).half() / 128
    )  # gates stay small: exp(-x) of float32 overflows at -88
    zeros = torch.randint(16, of_groups, generator=generator, dtype=torch.uint8) if has_zeros else None
    weight = Int4Experts(pack_int4(values, group), scales, zeros)
    middle = 8.0 if zeros is None else zeros.float().mT.repeat_interleave(group, 2)
    assert torch.equal(weight.exact_weight(), (values - middle) * scales.float().mT.repeat_interleave(group, 2))
    return weight


def test_kernel_of_names_what_serves_a_weight() -> None:
    weight = torch.empty(2, 128, 64, dtype=torch.bfloat16)
    assert kernel_of(weight, is_gated=True, on_hopper=True) == "list kernel up to 16 tokens, then grouped product"
    assert kernel_of(weight[:, :64], is_gated=True, on_hopper=True) == "grouped product"  # no whole tile of gate and up
    assert kernel_of(weight, is_gated=True, on_hopper=False) == "grouped product"
    assert kernel_of(weight.half(), is_gated=False, on_hopper=True) == "grouped product"
    scaled = ScaledExperts(weight.to(E4M3), torch.ones(2, 128))
    assert kernel_of(scaled, is_gated=True, on_hopper=True) == "grouped product in fp8"
    packed = pack_mxfp4(
        torch.zeros(2, 128, 2, 16, dtype=torch.uint8), torch.full((2, 128, 2), 127, dtype=torch.uint8), is_gated=True
    )
    assert kernel_of(packed, is_gated=True, on_hopper=True) == "list kernel, MXFP4 dequantized in registers"
