"""The tiles that the tuner tries fit their linear layers and include those that are served."""

import pytest

from bench.kernel.linear_shapes import MODELS, linear_shapes_of
from bench.kernel.skinny_tiles import ROWS, candidates
from kernels.skinny_linear_tiles import tiles_of


def test_linear_layers_of_a_rank() -> None:
    assert linear_shapes_of(MODELS["Llama-3.1-70B"], 2) == {
        "qkv": (5120, 8192, False),
        "o": (8192, 4096, False),
        "gate_up": (14336, 8192, True),
        "down": (8192, 14336, False),
        "head": (64128, 8192, False),
    }


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
def test_every_linear_layer_has_tiles_to_try(model: str, num_ranks: int) -> None:
    for name, shape in linear_shapes_of(MODELS[model], num_ranks).items():
        for num_rows in ROWS:
            assert list(candidates(num_rows, *shape)), (name, num_rows)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
def test_served_tiles_are_tried(model: str, num_ranks: int) -> None:
    for name, shape in linear_shapes_of(MODELS[model], num_ranks).items():
        for num_rows in ROWS:
            served = tiles_of(shape, num_rows)
            assert served is None or served in list(candidates(num_rows, *shape)), (name, num_rows)
