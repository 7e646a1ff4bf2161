"""Weights that are rounded to 4 bits while loading, with torch and in C++: exact where possible, else near the best."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kernels.cpu.linear import GROUP, quantized_to_4_bits
from kernels.w4a16.rounding import rounded_symmetric, rounded_with_minimum

Rounding = Callable[[Tensor, int], Tensor]  # returns the numbers that stand for a weight


def symmetric(weight: Tensor, group: int) -> Tensor:
    values, scales = rounded_symmetric(weight, group)
    return ((values.unflatten(1, (-1, group)).float() - 8) * scales[..., None]).flatten(1)


def with_minimum(weight: Tensor, group: int) -> Tensor:
    values, scales, minima = rounded_with_minimum(weight, group)
    return (values.unflatten(1, (-1, group)) * scales.float()[..., None] + minima.float()[..., None]).flatten(1)


def in_cpp(weight: Tensor, group: int) -> Tensor:
    assert group == GROUP
    return quantized_to_4_bits(weight).values()[:, : weight.shape[1]]


WITH_MINIMUM = [(with_minimum, GROUP), (in_cpp, GROUP)]


def normal(rows: int, columns: int, seed: int) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 0.02


def errors(weight: Tensor, rounded: Tensor, group: int) -> Tensor:
    return (rounded - weight).unflatten(1, (-1, group)).square().sum(2)


@pytest.mark.parametrize("group", [32, 64, 128])
def test_numbers_of_symmetric_groups_stay(group: int) -> None:
    generator = torch.Generator().manual_seed(1)
    integers = torch.randint(-8, 8, (64, 256), generator=generator).float()
    integers[:, ::group] = -8.0
    signs = torch.tensor([1.0, -1.0]).repeat(32)[:, None]
    scales = torch.rand(64, 256 // group, generator=generator).half().float() * signs
    weight = (integers.unflatten(1, (-1, group)) * scales[..., None]).flatten(1)
    assert torch.equal(symmetric(weight, group), weight)


@pytest.mark.parametrize("used", [16, 14])
@pytest.mark.parametrize(("rounding", "group"), WITH_MINIMUM)
def test_numbers_of_groups_with_a_minimum_stay(rounding: Rounding, group: int, used: int) -> None:
    """Also where a group does not use all integers, as in GGUF's blocks."""
    generator = torch.Generator().manual_seed(1)
    integers = torch.randint(0, used, (64, 256), generator=generator)
    integers[:, ::group], integers[:, 1::group] = 0, used - 1
    scales, minima = (torch.rand(64, 256 // group, generator=generator).half().float() for _ in range(2))
    weight = (integers.unflatten(1, (-1, group)) * scales[..., None] - minima[..., None]).flatten(1)
    # The sums of least squares have float32's rounding, which may lead to a neighbor of a float16: 2^-11 of a number.
    torch.testing.assert_close(rounding(weight, group), weight, rtol=0, atol=16 * 2**-11)
    assert (rounding(weight, group) == weight).float().mean() > 0.9


@pytest.mark.parametrize("group", [32, 64, 128])
def test_no_other_symmetric_scale_is_much_better(group: int) -> None:
    """The least squared error of a normal weight, which no other scale of the group improves by a tenth."""
    weight = normal(64, 512, seed=2)
    groups, found = weight.unflatten(1, (-1, group)), errors(weight, symmetric(weight, group), group)
    extreme = groups.gather(2, groups.abs().argmax(2, keepdim=True))
    for factor in torch.linspace(0.3, 1.2, 91).tolist():
        scale = extreme * (-factor / 8)
        other = ((groups / scale).round().clamp(-8, 7) * scale - groups).square().sum(2)
        assert (found <= other * 1.1).float().mean() > 0.99, factor


@pytest.mark.parametrize(("rounding", "group"), WITH_MINIMUM)
def test_no_other_range_is_much_better(rounding: Rounding, group: int) -> None:
    weight = normal(64, 512, seed=2)
    groups, found = weight.unflatten(1, (-1, group)), errors(weight, rounding(weight, group), group)
    low, high = groups.amin(2, keepdim=True), groups.amax(2, keepdim=True)
    for below in torch.linspace(-0.2, 0.2, 9).tolist():
        for above in torch.linspace(-0.2, 0.2, 9).tolist():
            minimum = low + below * (high - low)
            scale = (high + above * (high - low) - minimum) / 15
            other = ((groups - minimum) / scale).round().clamp(0, 15) * scale + minimum
            assert (found <= (other - groups).square().sum(2) * 1.1).float().mean() > 0.98, (below, above)


@given(rows=st.integers(1, 5), columns=st.integers(1, 100), seed=st.integers(0, 2**16))
def test_error_is_at_most_that_of_the_extremes(rows: int, columns: int, seed: int) -> None:
    """The last group of a row may be partly empty: its missing inputs are 0."""
    weight = normal(rows, columns, seed).bfloat16()
    made = quantized_to_4_bits(weight).values()
    padded = torch.zeros_like(made)
    padded[:, :columns] = weight
    groups = padded.unflatten(1, (-1, GROUP))
    low = groups.amin(2, keepdim=True).half().float()
    scales = ((groups.amax(2, keepdim=True) - groups.amin(2, keepdim=True)) / 15).half().float()
    plain = ((groups - low) / scales.masked_fill(scales == 0, 1)).round().clamp(0, 15) * scales + low
    # 1.001: both have float32's rounding.
    assert (errors(padded, made, GROUP) <= errors(padded, plain.flatten(1), GROUP) * 1.001).all()


def test_cpp_and_torch_agree() -> None:
    weight = normal(256, 512, seed=3)
    found, wanted = (errors(weight, rounding(weight, GROUP), GROUP) for rounding in (in_cpp, with_minimum))
    # Sums in another order choose another of two nearly equal fits now and then.
    assert torch.isclose(found, wanted, rtol=1e-4).float().mean() > 0.97
    torch.testing.assert_close(found.sum(), wanted.sum(), rtol=1e-3, atol=0)


@pytest.mark.parametrize("constant", [0.0, 3.0, -1e-9])
@pytest.mark.parametrize(("rounding", "group"), [*WITH_MINIMUM, (symmetric, 32)])
def test_equal_numbers_need_no_scale(rounding: Rounding, group: int, constant: float) -> None:
    weight = torch.full((2, 128), constant)
    # -1e-9 is below half of float16's smallest number.
    torch.testing.assert_close(rounding(weight, group), weight, rtol=2**-11, atol=1e-8)


@pytest.mark.parametrize("strange", [float("nan"), float("inf"), -float("inf"), 1e30])
@pytest.mark.parametrize(("rounding", "group"), [*WITH_MINIMUM, (symmetric, 32)])
def test_weights_without_a_scale_are_refused(rounding: Rounding, group: int, strange: float) -> None:
    weight = torch.ones(2, 128)
    weight[1, 40] = strange
    with pytest.raises(ValueError, match="cannot quantize to 4 bits: a weight is NaN, infinite or too large"):
        rounding(weight, group)
