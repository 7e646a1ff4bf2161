"""The tiles that are tried fit the products that they are tried for."""

import pytest

from bench.kernel.skinny_tiles import MODELS, ROWS, candidates
from kernels.skinny_linear_tiles import tiles_of


def test_products_of_a_rank() -> None:
    assert MODELS["70b"].products(2) == {
        "qkv": (5120, 8192),
        "o": (8192, 4096),
        "gate_up": (28672, 8192),
        "down": (8192, 14336),
        "head": (64128, 8192),
    }


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
def test_every_product_has_tiles_to_try(model: str, num_ranks: int) -> None:
    for name, (rows, inputs) in MODELS[model].products(num_ranks).items():
        is_gated = name == "gate_up"
        for num_rows in ROWS:
            assert list(candidates(num_rows, rows // (1 + is_gated), inputs, is_gated)), (name, num_rows)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
def test_the_tiles_that_are_served_are_tried(model: str, num_ranks: int) -> None:
    for name, (rows, inputs) in MODELS[model].products(num_ranks).items():
        is_gated = name == "gate_up"
        shape = (rows // (1 + is_gated), inputs, is_gated)
        for num_rows in ROWS:
            served = tiles_of(shape, num_rows)
            assert served is None or served in list(candidates(num_rows, *shape)), (name, num_rows)
