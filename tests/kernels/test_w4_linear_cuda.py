"""Products of packed 4-bit weights on a Hopper GPU against float64, for numbers of inputs with every kind of step."""

import pytest
import torch

from kernels.moe.weights import MIDDLE
from kernels.w4a16.weights import GROUPS, Offset, exact_weight, pack_w4, why_not_packed

if torch.cuda.is_available():
    from kernels.w4a16.few_rows import w4_linear
    from kernels.w4a16.one_row import serves_one_row, w4_one_row

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="no Hopper GPU here"
    ),
]
# Sums are in float32; with more than 32 rows the scaled weights are rounded to bfloat16, and so are all outputs.
TOLERANCE = 2.0**-8
# Steps of one, two and four tiles of inputs; tiles of 16 and 32 outputs for one row.
SHAPES = [(1152, 576), (576, 320), (256, 256), (640, 1536), (17_024, 2560)]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("offset", [Offset.ZERO_POINT, Offset.MINIMUM])
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("shape", SHAPES)
def test_products_equal_float64(shape: tuple[int, int], group: int, offset: Offset) -> None:
    rows, inputs = shape
    if inputs % group or why_not_packed(shape, group):
        assert inputs % max(64, group)
        return
    generator = torch.Generator("cuda").manual_seed(1)
    values = torch.randint(16, shape, generator=generator, device="cuda", dtype=torch.uint8)
    scales = torch.randn(rows, inputs // group, generator=generator, device="cuda").half()
    if offset is Offset.MINIMUM:
        weight = pack_w4(values, scales, minima=scales * -MIDDLE, is_gated=False)
    else:
        weight = pack_w4(values, scales, torch.full_like(scales, MIDDLE, dtype=torch.uint8), is_gated=False)
    for num_rows in (1, 8, 32, 33, 64, 128, 256, 700):
        x = torch.randn(num_rows, inputs, generator=generator, device="cuda").bfloat16()
        exact = x.double() @ exact_weight(weight).double().T
        products = [w4_linear(x, weight, None, False)]
        if num_rows == 1 and serves_one_row(weight):
            products.append(w4_one_row(x, weight))
        for product in products:
            error = torch.dist(product.double(), exact) / exact.norm()
            assert error < TOLERANCE, f"{num_rows} rows: {error}"
