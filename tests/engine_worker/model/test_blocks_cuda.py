"""A GGUF file's 4-bit blocks on a GPU: packed exactly; logits, memory and deterministic tokens on a Hopper GPU."""

from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from engine_worker.model.checkpoint_tensors import checkpoint_tensors
from engine_worker.model.grouped_bytes import why_not_on_gpu
from engine_worker.model.implementation import blueprint_from_directory
from engine_worker.model.linear import LinearSpec
from engine_worker.model.quantization.blocks_cuda import packed_blocks
from engine_worker.model.spec import ModelSpec
from engine_worker.model.specs.part import Role
from engine_worker.model.stored_blocks import StoredBlocks
from engine_worker.model.weight_format import DENSE, STORED_BLOCKS
from kernels.w4a16.weights import Offset, exact_weight
from tests.engine_worker.model.block_files import write_stored_blocks
from tests.engine_worker.model.families import write_family
from tests.engine_worker.model.int4_checkpoints import LLAMA
from tests.engine_worker.model.quantized_schedules import check_outputs, results_of
from tests.engine_worker.model.test_int4_cuda import logits_by

HAS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
# By layer and projection. Layer 1 has parts with and without minima; layer 2 two parts with 8 bits.
OTHERS = {
    (1, "q"): Kind.Q4_0, (1, "up"): Kind.Q4_0, (1, "o"): Kind.Q4_0, (2, "v"): Kind.Q8_0, (2, "down"): Kind.Q8_0,
}  # fmt: skip
NUM_LAYERS = 3


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    made = write_family(tmp_path / "model", LLAMA)
    kinds = {
        f"model.layers.{layer}.{part}.{name}_proj.weight": OTHERS.get((layer, name), Kind.Q4_1)
        for layer in range(NUM_LAYERS)
        for part, names in (("self_attn", "qkvo"), ("mlp", ("gate", "up", "down")))
        for name in names
    }
    write_stored_blocks(made, kinds)
    return made


def shapes_of(spec: ModelSpec, modules: tuple[str, ...]) -> list[tuple[int, int]]:
    tensors = checkpoint_tensors(spec)
    return [(rows, inputs) for rows, inputs in (tensors[f"{module}.weight"] for module in modules)]


@pytest.mark.parametrize(
    ("role", "layer", "names", "offset"),
    [
        (Role.QKV, 0, ("self_attn.q", "self_attn.k", "self_attn.v"), Offset.MINIMUM),
        (Role.GATE_UP, 1, ("mlp.gate", "mlp.up"), Offset.MINIMUM),
        (Role.OUT, 1, ("self_attn.o",), Offset.NONE),
    ],
)
def test_packed_blocks_are_those_of_the_file(
    directory: Path, role: Role, layer: int, names: tuple[str, ...], offset: Offset
) -> None:
    modules, blocks = (
        tuple(f"model.layers.{layer}.{name}_proj" for name in names),
        StoredBlocks(directory / STORED_BLOCKS),
    )
    spec = blueprint_from_directory(directory).shape
    assert isinstance(spec, ModelSpec)
    shapes = shapes_of(spec, modules)
    outputs, inputs = tuple(rows for rows, _ in shapes), shapes[0][1]
    order = torch.randperm(sum(outputs)) if role is Role.QKV else None
    linear = LinearSpec(role=role, names=modules, outputs=outputs, inputs=inputs, bias=False, row_order=order)
    packed = packed_blocks(linear, blocks, torch.device("cpu"))
    parts = [blocks.get(f"{module}.weight", shape) for module, shape in zip(modules, shapes, strict=True)]
    rows = torch.cat([part.values() for part in parts if part is not None])
    assert packed.offset is offset
    assert torch.equal(exact_weight(packed), rows if order is None else rows[order])


@pytest.mark.parametrize(
    ("types", "shape", "reason"),
    [
        ({"Q4_0", "Q4_1"}, (256, 64), ""),
        ({"Q4_1", "Q8_0"}, (256, 64), "some of its parts have no blocks of 4 bits"),
        ({"Q4_0", ""}, (256, 64), "some of its parts have no blocks of 4 bits"),
        ({"Q4_0"}, (256, 96), "it has 256 outputs and 96 inputs, and the kernels need multiples of 64"),
    ],
)
def test_layers_that_stay_in_16_bits_have_a_reason(types: set[str], shape: tuple[int, int], reason: str) -> None:
    assert why_not_on_gpu(types, *shape) == reason


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_HOPPER, reason="no Hopper GPU here")
def test_logits_are_no_farther_from_exact_ones_than_those_of_16_bits(directory: Path) -> None:
    blueprint = blueprint_from_directory(directory, quantization="as-stored", int4_group=128)
    assert isinstance(blueprint.shape, ModelSpec)
    found, weights = logits_by(blueprint.shape, directory, "cuda", torch.bfloat16, blueprint.shape.quantization)
    assert weights.loaded_bytes == blueprint.weights_bytes(1, 2) < 2 * blueprint.shape.num_parameters()
    exact, _ = logits_by(blueprint.shape, directory, "cpu", torch.float32, DENSE)
    in_16_bits, _ = logits_by(blueprint.shape, directory, "cuda", torch.bfloat16, DENSE)
    # Both round all activations; 16 bits also round the weights, and 4 bits with more than 32 rows.
    assert torch.dist(found, exact) < 1.3 * torch.dist(in_16_bits, exact)


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_HOPPER, reason="no Hopper GPU here")
@pytest.mark.timeout(600)
def test_bits_do_not_depend_on_the_schedule(directory: Path) -> None:
    results = results_of(directory)
    assert results["linear_layers"] == 4 * NUM_LAYERS - 2, "layer 2 has two with parts of 8 bits"
    for kv, outputs in results["kv"].items():
        check_outputs(kv, outputs)
