"""Float32 and bfloat16 linear layers in C++ and the following gate against torch; rows do not depend on the batch."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.cpu.dense import DenseLinear, gate_and_mul
from kernels.cpu.library import CpuLibrary
from kernels.cpu.step import DTYPES

FLOATS = sorted(DTYPES, key=DTYPES.__getitem__)
# Sums of 100 terms in another order, or one rounding of a result of up to 16.
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 2.0**-4}


@dataclass(frozen=True)
class Case:
    rows: int
    inputs: int
    outputs: int
    has_bias: bool
    is_exact: bool  # weights are bfloat16 values
    dtype: torch.dtype
    result: torch.dtype


CASES = st.builds(
    Case,
    rows=st.integers(0, 210),
    inputs=st.integers(1, 100),
    outputs=st.integers(1, 100),
    has_bias=st.booleans(),
    is_exact=st.booleans(),
    dtype=st.sampled_from(FLOATS),
    result=st.sampled_from(FLOATS),
)


@settings(max_examples=40, deadline=None)
@given(CASES, st.data())
def test_dense_linear_matches_torch_row_by_row(library: CpuLibrary, case: Case, data: st.DataObject) -> None:
    rows, inputs, outputs, result = case.rows, case.inputs, case.outputs, case.result
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, inputs, generator=generator).to(case.dtype)
    weight = torch.randn(outputs, inputs, generator=generator)
    weight = weight.bfloat16() if case.is_exact else weight
    bias = torch.randn(outputs, generator=generator) if case.has_bias else None
    expected = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    for instruction_set in library.instruction_sets:
        for stored in (weight, weight.float()):
            layer = DenseLinear(library, stored, bias, instruction_set)
            assert layer.packed.dtype == (torch.bfloat16 if case.is_exact else torch.float32)
            found = layer(x, result)
            assert found.dtype == result
            torch.testing.assert_close(found.double(), expected, atol=TOLERANCES[result], rtol=2.0**-8)
            first = data.draw(st.integers(0, rows))
            end = data.draw(st.integers(first, rows))
            assert torch.equal(layer(x[first:end], result), found[first:end])


def test_float32_values_are_not_rounded_to_bfloat16(library: CpuLibrary) -> None:
    weight = torch.full((3, 5), 1.0)
    assert DenseLinear(library, weight).packed.dtype == torch.bfloat16
    weight[2, 4] = 1.0 + 2.0**-20
    layer = DenseLinear(library, weight)
    assert layer.packed.dtype == torch.float32
    assert layer(torch.eye(5), torch.float32)[4].tolist() == [1.0, 1.0, 1.0 + 2.0**-20]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("is_gelu", [False, True])
@pytest.mark.parametrize("size", [8, 20, 1536])
def test_silu_and_mul_matches_torch_row_by_row(
    library: CpuLibrary, size: int, is_gelu: bool, dtype: torch.dtype
) -> None:
    gate_up = torch.randn(40, 2 * size, generator=torch.Generator().manual_seed(size)).mul_(2).to(dtype)
    gate_up[0, 0], gate_up[1, 0] = -1e4, 1e4
    gate, up = gate_up.float().chunk(2, dim=1)
    activated = torch.nn.functional.gelu(gate, approximate="tanh") if is_gelu else torch.nn.functional.silu(gate)
    for instruction_set in library.instruction_sets:
        gated = gate_and_mul(library, gate_up, is_gelu=is_gelu, instruction_set=instruction_set)
        torch.testing.assert_close(gated.float(), activated * up, atol=TOLERANCES[dtype] / 8, rtol=2.0**-8)
        alone = gate_and_mul(library, gate_up[7:8], is_gelu=is_gelu, instruction_set=instruction_set)
        assert torch.equal(alone, gated[7:8])
