"""Experts in one C++ call: the choice beside torch's, and the bits of loops over the experts."""

from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from engine_worker.model.quantization.dense_cpu import combined
from engine_worker.model.quantization.router_values import router_of
from engine_worker.model.specs.experts import RouterSpec
from engine_worker.model.specs.experts import Scoring as SpecScoring
from engine_worker.model.specs.mlp import GateSpec
from kernels.cpu.experts import PackedExperts
from kernels.cpu.library import CpuLibrary, cpu_library
from kernels.cpu.linear import Gate, GateLimits, PackedLinear, quantized, quantized_to_4_bits
from kernels.cpu.program import Buffers, NotRecordable, recording
from kernels.moe.choice import choose
from kernels.moe.routing import Router, Shared
from tests.kernels.cpu.emulation import EmulatedLibrary, emulated

INPUTS, INNER = 96, 64
LIMITS = GateLimits(1.702, 1.5, 1.0)


@pytest.fixture(scope="session", params=["this processor", pytest.param("AVX-512 by SIMDe", marks=pytest.mark.e2e)])
def experts_library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> CpuLibrary:
    if request.param == "this processor":
        return cpu_library()
    return EmulatedLibrary(emulated("linear_avx512.cpp", tmp_path_factory.mktemp("simde")))


def linears(
    num_experts: int, *, has_4_bits: bool = True, has_bias: bool = False
) -> list[tuple[PackedLinear, PackedLinear]]:
    generator = torch.Generator().manual_seed(3)
    number = quantized_to_4_bits if has_4_bits else quantized

    def packed(outputs: int, inputs: int, *, is_gated: bool) -> PackedLinear:
        bias = torch.randn(outputs, generator=generator) if has_bias else None
        return PackedLinear(number(torch.randn(outputs, inputs, generator=generator)), inputs, bias, is_gated=is_gated)

    return [
        (packed(2 * INNER, INPUTS, is_gated=True), packed(INPUTS, INNER, is_gated=False)) for _ in range(num_experts)
    ]


def looped(
    experts: list[tuple[PackedLinear, PackedLinear]], start: int, x: Tensor, chosen: tuple[Tensor, Tensor], gate: Gate
) -> Tensor:
    sums = torch.zeros_like(x, dtype=torch.float32)
    for number, (first, down) in enumerate(experts, start=start):
        tokens, slots = (chosen[0] == number).nonzero(as_tuple=True)
        if len(tokens):
            sums[tokens] += down(first(x[tokens], gate=gate, limits=LIMITS)).float() * chosen[1][tokens, slots, None]
    return sums.to(x.dtype)


@pytest.mark.parametrize("gate", Gate)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shared", get_args(Shared))
@pytest.mark.parametrize("form", [{}, {"has_4_bits": False}, {"has_bias": True}])
def test_tokens_have_the_bits_of_loops_in_any_batch(
    experts_library: CpuLibrary, gate: Gate, dtype: torch.dtype, form: dict[str, bool], shared: Shared
) -> None:
    router = Router(num_experts=7, top_k=3, shared=shared)
    experts = linears(7 + router.num_shared, **form)
    made = PackedExperts(router, experts, gate, library=experts_library, limits=LIMITS)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(32, INPUTS, generator=generator).to(dtype)
    logits = torch.randn(32, router.num_logits, generator=generator)
    logits[5] = logits[9] = torch.arange(router.num_logits)  # many tokens of the same experts
    wanted = looped(experts, 0, x, made.choose(logits), gate)
    for start, end in ((0, 32), (0, 1), (3, 10), (9, 9)):
        assert torch.equal(made(x[start:end], logits[start:end]), wanted[start:end])


def test_gates_with_limits_are_those_of_torch() -> None:
    """Values within and beyond the limits, in both directions."""
    weight = torch.randn(2 * INNER, INPUTS, generator=torch.Generator().manual_seed(2))
    packed = PackedLinear(quantized(weight), INPUTS, is_gated=True)
    x = torch.randn(9, INPUTS, generator=torch.Generator().manual_seed(1)) / 4
    spec = GateSpec(alpha=LIMITS.alpha, limit=LIMITS.limit, up_offset=LIMITS.up_offset)
    wanted = combined(PackedLinear(quantized(weight), INPUTS)(x), spec)
    torch.testing.assert_close(packed(x, gate=Gate.LIMITED_SILU, limits=LIMITS), wanted, rtol=1e-5, atol=1e-6)


def test_ranks_multiply_their_own_experts_only() -> None:
    experts = linears(6)
    router = Router(num_experts=6, top_k=2)
    x, logits = torch.randn(5, INPUTS), torch.randn(5, 6)
    logits[0] = torch.tensor([9.0, 8, 0, 0, 0, 0])  # nothing for the second rank
    parts = [PackedExperts(router, experts[at : at + 3], Gate.SILU, start=at) for at in (0, 3)]
    for part, at in zip(parts, (0, 3), strict=True):
        assert torch.equal(part(x, logits), looped(experts[at : at + 3], at, x, part.choose(logits), Gate.SILU))
    assert not parts[1](x[:1], logits[:1]).any()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"scoring": "softmax", "renormalize": True, "scale": 2.5},
        {"scoring": "softmax_of_chosen"},
        {"scoring": "sigmoid", "renormalize": True},
        {"scoring": "sigmoid", "scale": 0.5},
    ],
)
@pytest.mark.parametrize(
    ("num_experts", "top_k", "has_correction"), [(128, 8, False), (5, 5, True), (60, 4, True), (1, 1, False)]
)
def test_choice_is_that_of_torch(changes: dict[str, Any], num_experts: int, top_k: int, has_correction: bool) -> None:
    scoring = SpecScoring(changes.get("scoring", "softmax"))
    spec = RouterSpec(num_experts=num_experts, top_k=top_k, **{**changes, "scoring": scoring})
    correction = torch.randn(num_experts, generator=torch.Generator().manual_seed(7)) if has_correction else None
    logits = 4 * torch.randn(200, num_experts, generator=torch.Generator().manual_seed(5))
    logits[0], logits[1, 0], logits[2] = 0.0, 300.0, -300.0  # ties, and scores that round to 0 and 1
    ids, weights = PackedExperts(router_of(spec), linears(num_experts)[:1], Gate.SILU, correction=correction).choose(
        logits
    )
    wanted_ids, wanted_weights = choose(logits, router_of(spec), correction)
    assert torch.equal(ids, wanted_ids)
    torch.testing.assert_close(weights, wanted_weights, rtol=1e-5, atol=1e-7)  # exponentials round in other ways


def test_row_without_numbers_harms_no_other() -> None:
    experts, x, logits = linears(4), torch.randn(3, INPUTS), torch.randn(3, 4)
    made = PackedExperts(Router(num_experts=4, top_k=2), experts, Gate.SILU)
    wanted = made(x, logits)
    x[1], logits[1] = torch.nan, torch.nan
    found = made(x, logits)
    assert torch.equal(found[[0, 2]], wanted[[0, 2]]) and found[1].isnan().all()


def test_program_chooses_the_experts_of_its_step() -> None:
    made = PackedExperts(Router(num_experts=7, top_k=3), linears(7), Gate.SILU)
    x, logits = torch.randn(2, INPUTS), torch.randn(2, 7)
    buffers = Buffers()  # the program writes into them
    with recording(cpu_library(), buffers) as recorded:
        out = made(x, logits)
    for _ in range(3):
        x.copy_(torch.randn(2, INPUTS))
        logits.copy_(torch.randn(2, 7))
        recorded.program.run()
        assert torch.equal(out, made(x, logits))
    with pytest.raises(NotRecordable), recording(cpu_library(), buffers):
        choose(logits, Router(num_experts=7, top_k=3))
