"""Linear layers of grouped weights in C++: bit for bit against plain loops, and against float64 where sums are exact.

The AVX-512 source runs on any machine: it is compiled with SIMDe, which emulates each instruction.
"""

import ctypes
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kernels.cpu import build, linear
from kernels.cpu.library import InstructionSet, cpu_library
from kernels.cpu.linear import (
    GROUP,
    Gate,
    GateLimits,
    GroupedWeight,
    GroupFormat,
    PackedLinear,
    joined_rows,
    quantized,
    quantized_to_4_bits,
)
from tests.kernels.cpu.emulation import emulated as emulated_functions

try:
    cpu_library()
except build.NoLibrary as error:
    pytest.skip(f"no C++ kernels here: {error}", allow_module_level=True)

Kernel = linear.Kernel
LIMITS = GateLimits(1.702, 2.0, 1.0)


@pytest.fixture(scope="session")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Kernel:
    function = emulated_functions("linear_avx512.cpp", tmp_path_factory.mktemp("simde")).pagestream_linear_avx512
    function.argtypes = linear.plain_kernel().argtypes
    return function


@pytest.fixture(scope="session", params=[one.name for one in InstructionSet])
def kernel(request: pytest.FixtureRequest) -> Kernel:
    kernels = {one.name: found for one, found in linear.linear_kernels().items()}
    if request.param not in kernels:
        pytest.skip(f"this processor has no {request.param}")
    found: Kernel = kernels[request.param]
    return found


def random_weight(seed: int, format_: GroupFormat, outputs: int, inputs: int, is_exact: bool = False) -> GroupedWeight:
    """Return a random weight; with `is_exact`, scales and minima are powers of two, so short sums are exact."""
    generator = torch.Generator().manual_seed(seed)
    groups = -(-inputs // GROUP)
    is_int8 = format_ is GroupFormat.INT8
    least, end, dtype = (-128, 128, torch.int8) if is_int8 else (0, 256, torch.uint8)  # two 4-bit values per byte
    width = GROUP if is_int8 else GROUP // 2
    quants = torch.randint(least, end, (outputs, groups, width), generator=generator).to(dtype)

    def numbers() -> Tensor:
        if format_ is GroupFormat.E2M1:
            return torch.randint(125, 130, (outputs, groups), generator=generator).to(torch.uint8)
        if is_exact:
            return torch.exp2(torch.randint(-3, 2, (outputs, groups), generator=generator).float()).half()
        return torch.randn((outputs, groups), generator=generator).half()

    scales = numbers()
    return GroupedWeight(format_, quants, scales, -numbers() if format_ is GroupFormat.INT4_MINIMUM else None)


@dataclass(frozen=True)
class Case:
    format: GroupFormat
    outputs: int  # of the kernel
    inputs: int
    rows: int
    x_dtype: torch.dtype
    out_dtype: torch.dtype
    is_gated: bool
    gate: Gate
    has_bias: bool
    seed: int

    def packed(self, kernel: Kernel, is_exact: bool = False) -> PackedLinear:
        outputs = self.outputs * (2 if self.is_gated else 1)
        weight = random_weight(self.seed, self.format, outputs, self.inputs, is_exact)
        bias = torch.randint(-9, 10, (outputs,), generator=self.generator()).float() if self.has_bias else None
        return PackedLinear(weight, self.inputs, bias, is_gated=self.is_gated, kernel=kernel)

    def generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed)


DTYPES = st.sampled_from((torch.float32, torch.bfloat16))
CASES = st.builds(
    Case,
    format=st.sampled_from(GroupFormat),
    outputs=st.integers(1, 40),
    inputs=st.integers(1, 100),
    rows=st.integers(0, 20),
    x_dtype=DTYPES,
    out_dtype=DTYPES,
    is_gated=st.booleans(),
    gate=st.sampled_from(Gate),
    has_bias=st.booleans(),
    seed=st.integers(0, 2**16),
)


def check_against_plain_loops(kernel: Kernel, case: Case) -> None:
    magnitude = 10.0 ** torch.randn((case.rows, 1), generator=case.generator())
    wide = torch.randn((case.rows, case.inputs + 3), generator=case.generator()) * magnitude
    x = wide.to(case.x_dtype)[:, 1 : case.inputs + 1]  # rows of a wider tensor
    found, wanted = (
        case.packed(one)(x, torch.full((case.rows, case.outputs), 7, dtype=case.out_dtype), case.gate, limits=LIMITS)
        for one in (kernel, linear.plain_kernel())
    )
    assert torch.equal(found, wanted)


@given(case=CASES)
def test_instruction_sets_match_plain_loops(kernel: Kernel, case: Case) -> None:
    check_against_plain_loops(kernel, case)


@pytest.mark.e2e  # starts a compiler
@given(case=CASES)
def test_avx512_matches_plain_loops(emulated: Kernel, case: Case) -> None:
    check_against_plain_loops(emulated, case)


@given(case=CASES)
def test_plain_loops_match_the_reference(case: Case) -> None:
    """Inputs survive quantization unchanged and scales are powers of two, so the sums are exact in float32."""
    case = replace(case, is_gated=False)
    x = torch.randint(-127, 128, (case.rows, case.inputs), generator=case.generator()).float()
    x[:, ::GROUP] = 127  # the largest value of a group, so its scale is 1
    packed = case.packed(linear.plain_kernel(), is_exact=True)
    weight = random_weight(case.seed, case.format, case.outputs, case.inputs, is_exact=True)
    bias = torch.randint(-9, 10, (case.outputs,), generator=case.generator()) * case.has_bias
    wanted = x.double() @ weight.values()[:, : case.inputs].double().T + bias
    assert torch.equal(packed(x.to(case.x_dtype), torch.empty(wanted.shape)).double(), wanted)


@pytest.mark.parametrize("format_", GroupFormat)
@pytest.mark.parametrize("is_gated", [False, True])
def test_row_does_not_depend_on_batch_or_threads(format_: GroupFormat, is_gated: bool) -> None:
    packed = PackedLinear(random_weight(1, format_, 208, 576), 576, is_gated=is_gated)
    x = torch.randn((64, 576), generator=torch.Generator().manual_seed(2)).bfloat16()
    whole = packed(x)
    for rows in range(1, 65):
        assert torch.equal(packed(x[64 - rows :]), whole[64 - rows :]), rows
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert torch.equal(packed(x), whole)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("format_", GroupFormat)
@pytest.mark.parametrize("is_gated", [False, True])
def test_many_rows_match_single_rows(kernel: Kernel, format_: GroupFormat, is_gated: bool) -> None:
    packed = PackedLinear(random_weight(1, format_, 48 + 48 * is_gated, 96), 96, is_gated=is_gated, kernel=kernel)
    x = torch.randn((300, 96), generator=torch.Generator().manual_seed(2))
    assert torch.equal(packed(x), torch.cat([packed(row[None]) for row in x]))


@pytest.mark.parametrize("strange", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("format_", GroupFormat)
@pytest.mark.parametrize("is_gated", [False, True])
def test_nan_affects_only_its_own_row(kernel: Kernel, format_: GroupFormat, strange: float, is_gated: bool) -> None:
    packed = PackedLinear(random_weight(3, format_, 64, 64), 64, is_gated=is_gated, kernel=kernel)
    x = torch.randn((9, 64), generator=torch.Generator().manual_seed(4))
    healthy = packed(x)
    x[3, 40] = strange
    found = packed(x)
    assert found[3].isnan().all()
    assert torch.equal(found[torch.arange(9) != 3], healthy[torch.arange(9) != 3])


def test_zeros_and_subnormals_quantize_to_zero(kernel: Kernel) -> None:
    packed = PackedLinear(random_weight(3, GroupFormat.INT4_ZERO_8, 20, 64), 64, kernel=kernel)
    assert not packed(torch.zeros(3, 64)).any()
    assert not packed(torch.full((3, 64), 1e-38)).any()


@pytest.mark.parametrize("gate", [Gate.SILU, Gate.GELU_TANH])
def test_activations_match_torch_within_a_few_ulps(gate: Gate) -> None:
    """One input is 1, so gate and up are the weights: from -100 to 100, the whole range of e^x."""
    x = torch.linspace(-100, 100, 4001).half()
    scales = torch.cat((x, torch.ones_like(x)))[:, None]
    weight = GroupedWeight(GroupFormat.INT8, torch.zeros(len(scales), 1, GROUP, dtype=torch.int8), scales)
    weight.quants[..., 0] = 1
    found = PackedLinear(weight, 1, is_gated=True)(torch.ones(1, 1), gate=gate)[0]
    exact = x.double()
    inner = exact if gate is Gate.SILU else 2 * math.sqrt(2 / math.pi) * (exact + 0.044715 * exact**3)
    # The error of z is four units in its last place, which e^z multiplies by |z|; e^z is clamped to e^-87 and e^88,
    # where
    # the result is below 1e-35.
    wanted = exact / (1 + torch.exp(-inner))
    torch.testing.assert_close(found.double(), wanted, rtol=400 * 2**-23, atol=1e-35)


@given(rows=st.integers(0, 5), columns=st.integers(1, 100), seed=st.integers(0, 2**16))
def test_quantization_error_is_at_most_half_a_step(rows: int, columns: int, seed: int) -> None:
    weight = torch.randn((rows, columns), generator=torch.Generator().manual_seed(seed)).bfloat16()
    made = quantized(weight)
    values, steps = made.values(), made.scales.float().repeat_interleave(GROUP, 1)
    # A scale is rounded to float16: a group's largest value may exceed the last quant by 127 / 2048 of a step.
    assert ((values[:, :columns] - weight.float()).abs() <= steps[:, :columns] * (0.5 + 127 / 2048)).all()
    assert not values[:, columns:].any()


@pytest.mark.parametrize("quantize", [quantized, quantized_to_4_bits])
@pytest.mark.parametrize("strange", [float("nan"), float("inf"), 1e30])
def test_weights_without_a_scale_are_refused(strange: float, quantize: Callable[[torch.Tensor], GroupedWeight]) -> None:
    with pytest.raises(ValueError, match="NaN, infinite or too large"):
        quantize(torch.tensor([[1.0, strange]]))


def test_weights_of_several_formats_are_joined_in_the_one_that_holds_all() -> None:
    in_8_bits, symmetric, with_minimum, e2m1 = parts = [random_weight(1, format_, 16, 64) for format_ in GroupFormat]
    exact = torch.cat([part.values() for part in parts])
    in_4_bits = joined_rows([symmetric, with_minimum])
    assert in_4_bits.format is GroupFormat.INT4_MINIMUM and torch.equal(in_4_bits.values(), exact[16:48])
    assert torch.equal(joined_rows([in_8_bits] * 3).values(), exact[:16].repeat(3, 1))
    assert torch.equal(joined_rows([e2m1] * 2).values(), exact[48:].repeat(2, 1))
    joined = joined_rows(parts)
    largest = exact.unflatten(1, (-1, 32)).abs().amax(2, keepdim=True).expand(-1, -1, 32).flatten(1)
    assert joined.format is GroupFormat.INT8 and torch.equal(joined.values()[:16], exact[:16])
    assert ((joined.values() - exact).abs() <= largest / 254 * 1.001).all()  # 1.001: the scale is rounded
    with pytest.raises(ValueError, match="eight times a scale does not fit float16"):
        joined_rows([replace(symmetric, scales=symmetric.scales * 0 + 60_000), with_minimum])


def test_wrong_kernel_result_on_this_processor_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    fastest = linear.fastest_kernel()

    def wrong(*arguments: int) -> int:
        status: int = fastest(*arguments)
        out = (ctypes.c_float * 1).from_address(arguments[5])
        out[0] += 1
        return status

    assert linear.is_right(fastest)
    assert not linear.is_right(wrong)
    monkeypatch.setattr(linear, "is_right", lambda kernel: False)
    linear.linear_kernels.cache_clear()
    try:
        with pytest.raises(build.NoLibrary, match="differs from plain loops"):
            linear.linear_kernels()
    finally:
        linear.linear_kernels.cache_clear()
