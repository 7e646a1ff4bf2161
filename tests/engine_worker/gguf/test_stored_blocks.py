"""Blocks for CPUs, made of the quantized tensors of a GGUF file."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.numpy import save_file

from engine_worker.convert_gguf import convert
from engine_worker.gguf.metadata import ConversionError
from engine_worker.gguf.stored_blocks import block_type, blocks_of
from engine_worker.gguf.weights import Tensor, stored_rows
from engine_worker.model.grouped_bytes import stored_types
from engine_worker.model.stored_blocks import StoredBlocks
from engine_worker.model.weight_format import STORED_BLOCKS
from kernels.cpu.linear import GroupedWeight, GroupFormat
from tests.engine_worker.gguf.files import K_SCALES, random_blocks
from tests.engine_worker.gguf.test_convert_gguf import silent, write_gguf

SHAPE = 1024, 4096


def tensor_of(data: np.ndarray, kind: Kind, shape: tuple[int, ...] = SHAPE) -> Tensor:
    source: Any = SimpleNamespace(name="x", data=data, tensor_type=kind)
    return Tensor("x", shape, source)


def read_back(tensor: Tensor, directory: Path) -> tuple[GroupedWeight, np.ndarray]:
    """Return the blocks of a tensor, and its numbers as gguf dequantizes them."""
    kind, values = block_type(tensor), gguf.dequantize(tensor.source.data, tensor.source.tensor_type)
    assert kind is not None
    save_file({"x": blocks_of(tensor, stored_rows(tensor))}, directory / STORED_BLOCKS, metadata={"x": kind.name})
    rows, columns = tensor.shape
    found = StoredBlocks(directory / STORED_BLOCKS).get("x", (rows, columns))
    assert found is not None
    return found, values


def test_q4_k_has_4_bits_and_only_its_scales_are_rounded(tmp_path: Path) -> None:
    found, values = read_back(tensor_of(random_blocks(SHAPE, Kind.Q4_K), Kind.Q4_K), tmp_path)
    assert found.format is GroupFormat.INT4_MINIMUM and found.minima is not None
    # float16 has 11 bits; the scale counts up to 15 times.
    bound = (15 * found.scales.float() + found.minima.float().abs()) / 2**11
    error = (found.values() - torch.from_numpy(values)).abs().unflatten(1, (-1, 32)).amax(2)
    assert (error <= bound).all() and error.max() > 0


@pytest.mark.parametrize("kind", [Kind.Q5_0, Kind.Q5_1, Kind.Q5_K, Kind.Q6_K])
def test_other_types_are_rounded_to_8_bits(kind: Kind, tmp_path: Path) -> None:
    normal = np.random.default_rng(0).standard_normal(SHAPE).astype(np.float32)
    data = random_blocks(SHAPE, kind) if kind in K_SCALES else gguf.quantize(normal, kind)
    found, values = read_back(tensor_of(data, kind), tmp_path)
    groups = torch.from_numpy(values).unflatten(1, (-1, 32))
    error = (found.values().unflatten(1, (-1, 32)) - groups).abs().amax(2)
    # Half a step, and float16's rounding of the scale, which counts up to 127 times.
    assert found.format is GroupFormat.INT8 and (error <= groups.abs().amax(2) * (1 / 254 + 1 / 2**11)).all()


def test_floats_and_odd_shapes_have_no_blocks() -> None:
    for kind in (Kind.F32, Kind.F16, Kind.BF16):
        assert block_type(tensor_of(np.zeros(0), kind)) is None
    assert block_type(tensor_of(np.zeros(0), Kind.Q8_0, (32,))) is None


def test_scale_beyond_float16_is_refused() -> None:
    data = random_blocks((1, 256), Kind.Q4_K)
    data[:, :2] = np.array([60_000], np.float16).view(np.uint8)
    with pytest.raises(ConversionError, match="tensor x: a scale of type Q4_K does not fit float16"):
        blocks_of(tensor_of(data, Kind.Q4_K, (1, 256)), data)


def test_conversion_writes_the_blocks_and_says_what_it_changed(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", kinds={"ffn_gate": Kind.Q4_0, "ffn_up": Kind.Q5_0})
    said = []
    convert(tmp_path / "m.gguf", tmp_path / "model", lambda progress, detail: said.append(detail))
    types = stored_types(tmp_path / "model" / STORED_BLOCKS)
    assert types == {
        f"model.layers.{layer}.mlp.{name}_proj.weight": kind
        for layer in range(2)
        for name, kind in (("gate", "Q4_0"), ("up", "Q8_0"))
    }
    assert "in blocks: 2 tensors of Q5_0 as Q8_0" in said
    write_gguf(tmp_path / "floats.gguf")
    convert(tmp_path / "floats.gguf", tmp_path / "floats", silent)
    assert not (tmp_path / "floats" / STORED_BLOCKS).exists()
