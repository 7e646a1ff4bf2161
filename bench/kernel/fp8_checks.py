"""Check fp8 linear layers and input quantization on a GPU against float64.

A result is compared with the exact product of the quantized operands, so the error is that of summation and rounding.
"""

import torch
from torch import Tensor

from bench.kernel.cases import Check, Error, measure_error, poisoned, same_bits
from engine_worker.model.linear import Input
from engine_worker.model.quantization.fp8_cuda import Fp8Linear
from engine_worker.model.specs.mlp import SILU
from kernels.fp8_kv import E4M3_MAX
from kernels.fp8_quantize import quantize_groups, quantize_rows
from kernels.recurrent.output_gates import gated_rms_norm, multiply_sigmoid, rms_norm_of_gated
from kernels.rms_norm import add_rms_norm, add_rms_norm_quantized
from kernels.scaled import GROUP, Scaled, Scaling, quantize_groups_reference, quantize_rows_reference
from kernels.silu_and_mul import silu_and_mul, silu_and_mul_quantized, silu_and_mul_reference

# Outputs, inputs, is gated: two 8B models, a smaller one, one on two GPUs, and a K of five groups.
PRODUCTS = (
    (6144, 4096, False),
    (4096, 14_336, False),
    (14_336, 4096, True),
    (1024, 3072, False),
    (3072, 1024, True),
    (4096, 7168, False),
    (1280, 640, False),
    (96, 5120, False),  # padded to whole tiles; it has no whole block of scales
)
# The kernel's own tiles and their edges, and the library's kernels with multiples of four and others.
ROWS = (1, 7, 16, 33, 64, 65, 100, 128, 129, 512, 1001)


def random_weight(num_outputs: int, num_inputs: int, is_grouped: bool, generator: torch.Generator) -> Scaled:
    """Make a weight whose blocks of 128 x 128, or rows, differ in magnitude by up to a factor of ten."""
    device = generator.device
    exact = torch.randn(num_outputs, num_inputs, device=device, generator=generator) * 0.02
    if not is_grouped:
        exact *= 10 ** torch.rand(num_outputs, 1, device=device, generator=generator)
        return quantize_rows_reference(exact)
    blocks = exact.view(num_outputs // GROUP, GROUP, num_inputs // GROUP, GROUP)
    blocks *= 10 ** torch.rand(len(blocks), 1, blocks.shape[2], 1, device=device, generator=generator)
    scales = blocks.abs().amax((1, 3)) / E4M3_MAX
    values = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn)
    return Scaled(values.view(num_outputs, num_inputs), scales)


def check_linear(num_outputs: int, num_inputs: int, is_gated: bool, num_rows: int, is_grouped: bool) -> Check:
    """Check for two units of bfloat16, the same bits alone and in a batch, and on a second run."""

    def check(generator: torch.Generator) -> list[Error]:
        x = torch.randn(num_rows, num_inputs, dtype=torch.bfloat16, device=generator.device, generator=generator)
        weight = random_weight(num_outputs * (1 + is_gated), num_inputs, is_grouped, generator)
        linear = Fp8Linear(weight.values, weight.scales, is_gated=is_gated)

        def run(rows: Tensor) -> Tensor:
            return _tensor(linear.gated(rows, SILU) if is_gated else linear(rows))

        output = poisoned(lambda: run(x))
        rows = quantize_groups_reference(x) if is_grouped else quantize_rows_reference(x)
        exact = rows.exact_rows().double() @ weight.exact_weight().double().T
        exact = silu_and_mul_reference(exact) if is_gated else exact
        errors = [measure_error(output, exact, 2 * torch.finfo(torch.bfloat16).eps), same_bits(run(x), output)]
        return errors if num_rows > 64 else [*errors, same_bits(run(x[-1:]), output[-1:])]

    return check


def check_invariance(num_outputs: int, num_inputs: int, is_gated: bool, is_grouped: bool) -> Check:
    """Check that with --deterministic rows have the same bits in any batch."""

    def check(generator: torch.Generator) -> list[Error]:
        x = torch.randn(300, num_inputs, dtype=torch.bfloat16, device=generator.device, generator=generator)
        weight = random_weight(num_outputs * (1 + is_gated), num_inputs, is_grouped, generator)
        linear = Fp8Linear(weight.values, weight.scales, is_gated=is_gated, is_deterministic=True)

        def run(rows: Tensor) -> Tensor:
            return _tensor(linear.gated(rows, SILU) if is_gated else linear(rows))

        many = run(x)
        return [same_bits(run(x[:rows]), many[:rows]) for rows in (1, 5, 16, 32, 33, 64, 65, 128, 129, 256)]

    return check


def check_quantizers(num_rows: int, width: int) -> Check:
    """Check quantized values against the reference, and fused kernels bit by bit against separate ones."""

    def check(generator: torch.Generator) -> list[Error]:
        def random(*size: int) -> Tensor:
            return torch.randn(size, dtype=torch.bfloat16, device=generator.device, generator=generator)

        x, residual, weight = random(num_rows, width), random(num_rows, width), random(width)
        x[0] = 0.0
        normed, new_residual = add_rms_norm(x, residual, weight, 1e-5)
        errors = []
        for is_grouped, reference, kernel in (
            (False, quantize_rows_reference, quantize_rows),
            (True, quantize_groups_reference, quantize_groups),
        ):
            expected, found = reference(x), poisoned(lambda kernel=kernel: kernel(x))
            # The kernel multiplies with a reciprocal, so a value halfway between two may round to the other one.
            errors.append(measure_error(found.exact_rows(), expected.exact_rows().double(), 2**-3))
            errors.append(measure_error(found.exact_rows(), x.double(), 2**-4))
            fused, added = add_rms_norm_quantized(x, residual, weight, 1e-5, is_grouped)
            errors += [_same(fused, kernel(normed)), same_bits(added, new_residual)]
            errors += _gates(x, residual, weight.float(), Scaling.GROUPS if is_grouped else Scaling.ROWS)
        gate_up = random(num_rows, 2 * width)
        return [*errors, _same(silu_and_mul_quantized(gate_up), quantize_rows(silu_and_mul(gate_up)))]

    return check


def _gates(x: Tensor, gate: Tensor, weight: Tensor, scaling: Scaling) -> list[Error]:
    """Compare the gates of a mixer's outputs that quantize with quantizers of the plain ones."""
    quantize, head = quantize_groups if scaling is Scaling.GROUPS else quantize_rows, weight[:GROUP]
    pairs = (
        (gated_rms_norm(x, gate, head, 1e-5, scaling), gated_rms_norm(x, gate, head, 1e-5)),
        (rms_norm_of_gated(x, gate, weight, 1e-5, 1, scaling), rms_norm_of_gated(x, gate, weight, 1e-5, 1)),
        (multiply_sigmoid(x.clone(), gate, scaling), multiply_sigmoid(x.clone(), gate)),
    )
    return [_same(_scaled(fused), quantize(_tensor(plain))) for fused, plain in pairs]


def _scaled(output: Input) -> Scaled:
    assert isinstance(output, Scaled), "the output must be quantized"
    return output


def _tensor(output: Input) -> Tensor:
    assert isinstance(output, Tensor), "the output must not be quantized"
    return output


def _same(one: Scaled, other: Scaled) -> Error:
    return same_bits(one.exact_rows(), other.exact_rows())


def fp8_checks() -> dict[str, Check]:
    checks: dict[str, Check] = {}
    for num_outputs, num_inputs, is_gated in PRODUCTS:
        for is_grouped in (False, True) if num_outputs % GROUP == 0 else (False,):
            for num_rows in ROWS:
                kind = f"{'gated ' if is_gated else ''}{'blocks' if is_grouped else 'rows'}"
                name = f"fp8 {num_outputs} x {num_inputs} {kind} T={num_rows}"
                checks[name] = check_linear(num_outputs, num_inputs, is_gated, num_rows, is_grouped)
            checks[f"fp8 {num_outputs} x {num_inputs} invariance {is_grouped}"] = check_invariance(
                num_outputs, num_inputs, is_gated, is_grouped
            )
    for num_rows, width in ((1, 4096), (3, 14_336), (1000, 896), (70, 128)):
        checks[f"fp8 quantizers {num_rows} x {width}"] = check_quantizers(num_rows, width)
    return checks
