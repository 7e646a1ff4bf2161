"""The Triton short convolution equals torch, in any chunks."""

from tests.kernels import short_conv_cases


def test_convolution_in_chunks_equals_torch() -> None:
    short_conv_cases.check("cpu")
