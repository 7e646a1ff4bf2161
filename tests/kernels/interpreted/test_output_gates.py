"""Gates of a mixer's outputs that quantize their results equal the plain ones, quantized after."""

import pytest
import torch
from torch import Tensor

from kernels.fp8_quantize import quantize_groups, quantize_rows
from kernels.recurrent.output_gates import gated_rms_norm, multiply_sigmoid, rms_norm_of_gated
from kernels.scaled import Scaled, Scaling, plain_rows

EPS = 1e-6
QUANTIZE = {Scaling.ROWS: quantize_rows, Scaling.GROUPS: quantize_groups}
ROWS = 3


def random(*size: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(len(size)))


def gate_beside_other_outputs(width: int) -> Tensor:
    return random(ROWS, width + 64).half()[:, 64:]


def assert_same(found: Tensor | Scaled, plain: Tensor | Scaled, scaling: Scaling) -> None:
    expected = QUANTIZE[scaling](plain_rows(plain))
    assert isinstance(found, Scaled)
    assert torch.equal(found.values.view(torch.uint8), expected.values.view(torch.uint8))
    assert torch.equal(found.scales, expected.scales)


@pytest.mark.parametrize("scaling", QUANTIZE)
@pytest.mark.parametrize(("num_heads", "size"), [(5, 128), (20, 128), (4, 64)])
def test_a_gated_norm_of_heads(num_heads: int, size: int, scaling: Scaling) -> None:
    x, gate, weight = random(ROWS, num_heads * size).half(), gate_beside_other_outputs(num_heads * size), random(size)
    assert_same(gated_rms_norm(x, gate, weight, EPS, scaling), gated_rms_norm(x, gate, weight, EPS), scaling)


@pytest.mark.parametrize("scaling", QUANTIZE)
@pytest.mark.parametrize(("num_groups", "size"), [(1, 640), (3, 128), (2, 192)])
def test_a_norm_of_gated_groups(num_groups: int, size: int, scaling: Scaling) -> None:
    x, gate, weight = random(ROWS, num_groups * size).half(), gate_beside_other_outputs(num_groups * size), random(640)
    found = rms_norm_of_gated(x, gate, weight[: num_groups * size], EPS, num_groups, scaling)
    assert_same(found, rms_norm_of_gated(x, gate, weight[: num_groups * size], EPS, num_groups), scaling)


@pytest.mark.parametrize("scaling", QUANTIZE)
@pytest.mark.parametrize("size", [640, 1408])
def test_a_sigmoid_gate(size: int, scaling: Scaling) -> None:
    x, gate = random(ROWS, size).half(), gate_beside_other_outputs(size)
    assert_same(multiply_sigmoid(x.clone(), gate, scaling), multiply_sigmoid(x.clone(), gate), scaling)
