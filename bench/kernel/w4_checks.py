"""Check linear layers with 4-bit weights on a GPU against float64, for the same bits in a batch, and for races."""

from functools import partial

import torch
from torch import Tensor

from bench.kernel.cases import Check, Error, measure_error, poisoned, rounding_tolerance, same_bits
from engine_worker.model.quantization.int4_cuda import W4Linear
from engine_worker.model.specs.mlp import GELU_TANH, SILU
from kernels.silu_and_mul import gelu_tanh_and_mul_reference, silu_and_mul_reference
from kernels.w4a16.dequantize import dequantize
from kernels.w4a16.few_rows import exact_rows
from kernels.w4a16.weights import Offset, W4Weight, exact_weight, pack_w4

# Outputs, inputs and group. In this order: whole tiles of 128 outputs; an odd number of tiles of 64, twice; few tiles
# that many programs share; enough outputs for tiles of 32 in the kernel for one row.
SHAPES = ((6144, 2048, 128), (576, 1536, 32), (192, 576, 64), (1024, 14336, 128), (17_024, 512, 64))
ROWS = (1, 16, 32, 33, 100, 300, 800)


def random_weight(
    num_outputs: int, num_inputs: int, group: int, generator: torch.Generator, *, offset: Offset, is_gated: bool
) -> W4Weight:
    """Return a weight with bfloat16 scales, or float16 ones with offsets, as AWQ, GPTQ and GGUF store them."""

    def integers(columns: int) -> Tensor:
        return torch.randint(
            16, (num_outputs, columns), dtype=torch.uint8, device=generator.device, generator=generator
        )

    groups = num_inputs // group
    scales = torch.rand(num_outputs, groups, device=generator.device, generator=generator) * 0.01 + 0.001
    scales = scales.bfloat16() if offset is Offset.NONE else scales.half()
    zeros = integers(groups) if offset is Offset.ZERO_POINT else None
    minima = -(scales * integers(groups)) if offset is Offset.MINIMUM else None
    return pack_w4(integers(num_inputs), scales, zeros, minima, is_gated=is_gated)


def check_linear(num_outputs: int, num_inputs: int, group: int, num_rows: int, *, offset: Offset) -> Check:
    def check(generator: torch.Generator) -> list[Error]:
        x = torch.randn(num_rows, num_inputs, dtype=torch.bfloat16, device=generator.device, generator=generator)
        bias = torch.randn(num_outputs, dtype=torch.bfloat16, device=generator.device, generator=generator)
        errors = []
        for gate in (None, SILU, GELU_TANH):
            weight = random_weight(num_outputs, num_inputs, group, generator, offset=offset, is_gated=gate is not None)
            exact = x.double() @ exact_weight(weight).double().T + bias.double()
            if gate is not None:
                activation = silu_and_mul_reference if gate is SILU else gelu_tanh_and_mul_reference
                exact = activation(exact)
            linear = W4Linear(weight, bias, is_deterministic=False)
            call = partial(linear, x) if gate is None else partial(linear.gated, x, gate)
            output = poisoned(call)
            # With more rows weights are rounded too, and scales in float16.
            units = 2 if num_rows <= exact_rows(weight) else 4
            errors.append(measure_error(output, exact, units * rounding_tolerance(torch.bfloat16)))
            errors += [same_bits(call(), output) for _ in range(3)]
        return errors

    return check


def check_invariance(num_outputs: int, num_inputs: int, group: int, offset: Offset) -> Check:
    """Check that with --deterministic rows have the same bits in any batch."""

    def check(generator: torch.Generator) -> list[Error]:
        x = torch.randn(100, num_inputs, dtype=torch.bfloat16, device=generator.device, generator=generator)
        weight = random_weight(num_outputs, num_inputs, group, generator, offset=offset, is_gated=False)
        linear = W4Linear(weight, None, is_deterministic=True)
        many = linear(x)
        return [same_bits(linear(x[:rows].contiguous()), many[:rows]) for rows in (1, 5, 8, 9, 16, 17, 32, 33, 64)]

    return check


def check_dequantized(num_outputs: int, num_inputs: int, group: int) -> Check:
    def check(generator: torch.Generator) -> list[Error]:
        weights = [
            random_weight(num_outputs, num_inputs, group, generator, offset=offset, is_gated=is_gated)
            for is_gated, offset in ((False, Offset.NONE), (True, Offset.ZERO_POINT), (True, Offset.MINIMUM))
        ]
        return [same_bits(poisoned(lambda w=w: dequantize(w)), exact_weight(w).bfloat16()) for w in weights]

    return check


def w4_checks() -> dict[str, Check]:
    checks: dict[str, Check] = {}
    for shape in SHAPES:
        name = "w4 {} x {} group {}".format(*shape)
        checks[f"{name} dequantized"] = check_dequantized(*shape)
        checks[f"{name} invariance"] = check_invariance(*shape, Offset.NONE)
        checks[f"{name} invariance with minima"] = check_invariance(*shape, Offset.MINIMUM)
        for num_rows in ROWS:
            for offset in Offset:
                checks[f"{name} T={num_rows} {offset.name}"] = check_linear(*shape, num_rows, offset=offset)
    return checks
