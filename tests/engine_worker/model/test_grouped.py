"""Weights in groups of 32 on a CPU: blocks of a GGUF file as stored, or int8 made while loading."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from torch import Tensor

from engine_worker.estimate import main as estimate_main
from engine_worker.execution.load.load import load_model_runner
from engine_worker.execution.load.load_replica import load_plan
from engine_worker.execution.settings import ExecutionSettings
from engine_worker.gguf.stored_blocks import IN_PLACE
from engine_worker.model.devices import check_quantization
from engine_worker.model.implementation import blueprint_from_directory
from engine_worker.model.network import Network
from engine_worker.model.quantization import dense, grouped
from engine_worker.model.stored_blocks import StoredBlocks
from engine_worker.model.weight_format import AS_STORED, STORED_BLOCKS
from engine_worker.model.weights import SafetensorsWeights
from engine_worker.scheduling.batch import ScheduledBatch, ScheduledSequence
from kernels.cpu.build import NoLibrary
from kernels.cpu.linear import linear_kernels
from tests.builders import make_sequence
from tests.engine_worker.execution.reference import write_model
from tests.engine_worker.execution.reference_inputs import reference_model_input
from tests.engine_worker.model.block_files import write_stored_blocks

CPU = torch.device("cpu")
BLOCK_SIZE = 8


def has_library() -> bool:
    try:
        return bool(linear_kernels())
    except NoLibrary:
        return False


needs_library = pytest.mark.skipif(not has_library(), reason="no C++ kernels here: `python -m kernels.cpu` says why")


@pytest.mark.parametrize("type_", IN_PLACE)
def test_gguf_blocks_are_dequantized_as_gguf_does(type_: gguf.GGMLQuantizationType, tmp_path: Path) -> None:
    values = np.random.default_rng(0).standard_normal((5, 96)).astype(np.float32)
    blocks = gguf.quantize(values, type_)
    save_file({"a": blocks}, tmp_path / STORED_BLOCKS, metadata={"a": type_.name})
    stored = StoredBlocks(tmp_path / STORED_BLOCKS)
    found = stored.get("a", (5, 96))
    assert found is not None
    assert np.array_equal(found.values().numpy(), gguf.dequantize(blocks, type_))
    assert stored.get("b", (5, 96)) is None
    for shape in ((5, 64), (5, 97), (4, 96)):
        with pytest.raises(ValueError, match=r"a has \(5, \d+\) bytes of blocks; config.json requires"):
            stored.get("a", shape)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Write a model whose widths are multiples of 32, with blocks of all linear layers and of the tied embedding."""
    made = write_model(tmp_path, hidden_size=96, intermediate_size=64, head_dim=16, tie_word_embeddings=True)
    spec = blueprint_from_directory(made).shape
    types = {}
    for index in range(spec.num_layers):
        for name in ("q", "k", "v", "o"):
            types[f"model.layers.{index}.self_attn.{name}_proj.weight"] = IN_PLACE[1]
        for name in ("gate", "up", "down"):
            types[f"model.layers.{index}.mlp.{name}_proj.weight"] = IN_PLACE[index % 2 * 2]
    write_stored_blocks(made, types | {"model.embed_tokens.weight": IN_PLACE[2]})
    return made


def logits_of(directory: Path, quantization: str, dtype: torch.dtype = torch.float32) -> Tensor:
    source = SafetensorsWeights(directory, CPU, dtype, lambda progress, detail: None)
    model = blueprint_from_directory(directory, quantization=quantization).build(source, 64, is_deterministic=False)
    assert isinstance(model, Network)
    spec, sequence = model.spec, make_sequence(30, "one prompt")
    sequence.kv.tables[0].blocks = [3, 1, 2, 4]
    pool = torch.zeros(8, spec.num_layers, 2, spec.num_kv_heads, BLOCK_SIZE, spec.head_dim, dtype=dtype)
    batch = ScheduledBatch([ScheduledSequence(sequence, 0, 30, samples=True)])
    return model.forward(reference_model_input(batch, BLOCK_SIZE), model.attach(pool))


@needs_library
def test_model_as_stored_has_the_dequantized_logits(directory: Path) -> None:
    """Rows have 16 bits, which costs a thousandth of the deviation."""
    exact, stored = logits_of(directory, "none"), logits_of(directory, "as-stored")
    assert stored.dtype == torch.float32
    assert float((exact - stored).std()) < 1e-3 * float(exact.std())
    assert torch.equal(exact.argmax(-1), stored.argmax(-1))


@needs_library
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_model_in_8_bits_has_nearly_the_same_logits(directory: Path, dtype: torch.dtype) -> None:
    exact, quantized = logits_of(directory, "none"), logits_of(directory, "int8", dtype)
    # int8 weights have an error of 1 / 254 of a group's largest: 5 % after three random layers, 6 % in bfloat16.
    assert float((exact - quantized).std()) < 0.1 * float(exact.std())


@needs_library
def test_model_in_4_bits_has_similar_logits(directory: Path) -> None:
    """An error of 1 / 30 of a group's range makes a fifth of the deviation after three random layers."""
    exact, quantized = logits_of(directory, "none"), logits_of(directory, "int4")
    assert float((exact - quantized).std()) < 0.4 * float(exact.std())


@needs_library
def test_layers_with_a_part_outside_groups_stay_in_16_bits(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="worker")
    write_stored_blocks(directory, {"model.layers.0.self_attn.q_proj.weight": IN_PLACE[0]})
    exact, stored = logits_of(directory, "none"), logits_of(directory, "as-stored")
    torch.testing.assert_close(exact, stored)
    assert "model.embed_tokens.weight: kept in 16 bits: not stored in 4 or 8 bits" in caplog.messages
    assert (
        sum("some of its parts are not in groups of 32" in message for message in caplog.messages) == 4 * 3
    )  # linear layers, layers


@needs_library
def test_parts_in_several_formats_share_one(directory: Path) -> None:
    """Files of Q4_K_M have queries and keys in 4 bits beside values in 8."""
    projections = {f"model.layers.{layer}.self_attn.{name}_proj.weight": name for layer in range(3) for name in "qkvo"}
    types = {name: IN_PLACE["qkv".find(projection)] for name, projection in projections.items()}
    write_stored_blocks(directory, types)
    exact, stored = logits_of(directory, "none"), logits_of(directory, "as-stored")
    assert float((exact - stored).std()) < 0.1 * float(exact.std())  # as in 8 bits
    blueprint = blueprint_from_directory(directory, quantization="as-stored")
    source = SafetensorsWeights(directory, CPU, torch.float32, lambda progress, detail: None)
    blueprint.build(source, 64, False)
    assert blueprint.weights_bytes(1, 4) == source.loaded_bytes


def test_missing_library_falls_back_to_16_bits_and_logs(
    directory: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none() -> dict[Any, Any]:
        raise NoLibrary("there is no C++ compiler")

    monkeypatch.setattr(grouped, "linear_kernels", none)
    assert torch.equal(logits_of(directory, "as-stored"), logits_of(directory, "none"))
    assert set(caplog.messages) == {
        "weights: falling back to 16 bits and torch operators, slower: no C++ kernels: there is no C++ compiler"
    }
    assert isinstance(grouped.method(AS_STORED, "cpu"), dense.DenseMethod)


def test_unavailable_format_is_refused(directory: Path) -> None:
    (directory / STORED_BLOCKS).unlink()
    with pytest.raises(ValueError, match=r"as-stored needs .* stored_blocks.safetensors.* int8 and int4 quantize"):
        blueprint_from_directory(directory, quantization="as-stored")
    with pytest.raises(ValueError, match="--quantization int8 needs --device cpu; on cuda use auto, none, fp8 or int4"):
        check_quantization("int8", "cuda")
    check_quantization("int8", "cpu")


@needs_library
def test_worker_start_uses_gguf_blocks_and_float32(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Float32 is used on every processor, since bfloat16 between integer layers would only add rounding."""
    caplog.set_level("INFO", logger="worker")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    settings = ExecutionSettings(model=directory, device="cpu", kv_cache_memory_bytes=2**24, max_model_len=64)
    plan = load_plan(settings)
    assert plan.settings.quantization == "as-stored"
    assert sum(message.startswith("--quantization auto is as-stored") for message in caplog.messages) == 1
    runner = load_model_runner(settings, lambda phase, progress, detail: None)
    assert (runner.quantization, runner.dtype_name) == ("as-stored", "float32")
    assert runner.kv_cache_dtype == "bfloat16" and runner.replica.kv_cache.pool.dtype == torch.bfloat16
    assert sum(message.startswith("--kv-cache-dtype auto is bfloat16") for message in caplog.messages) == 2
    # Float32 on every machine: some would choose bfloat16, which takes fewer bytes than these blocks for so small a
    # model.
    exactly = replace(settings, quantization="none", dtype="float32")
    exact = load_model_runner(exactly, lambda phase, progress, detail: None)
    assert (exact.quantization, exact.kv_cache_dtype) == ("none", "float32")
    assert exact.block_bytes == 2 * runner.block_bytes and runner.weights_bytes < exact.weights_bytes


@needs_library
@pytest.mark.parametrize("quantization", ["as-stored", "int4", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_estimate_matches_the_held_bytes(directory: Path, quantization: str, dtype: torch.dtype) -> None:
    """The model has several formats, a separate head, and a token count that is not a multiple of 16."""
    blueprint = blueprint_from_directory(directory, quantization=quantization)
    source = SafetensorsWeights(directory, CPU, dtype, lambda progress, detail: None)
    blueprint.build(source, 64, False)
    assert blueprint.weights_bytes(1, dtype.itemsize) == source.loaded_bytes


def test_cpu_estimate_counts_the_gguf_blocks(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def report(*flags: str) -> str:
        assert estimate_main([str(directory), "--max-model-len", "64", "--max-num-seqs", "64", *flags]) == 0
        return capsys.readouterr().out

    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    blocks, hint = "linear layers in blocks of 4 and 8 bits", "Use --device cpu for a CPU"
    assert blocks not in report() and report().count(hint) == 1
    on_cpu = report("--device", "cpu")
    *reason_lines, of_format, of_kv = on_cpu.splitlines(keepends=True)
    assert report("--device", "cpu", "--quantization", "as-stored") == "".join([*reason_lines, of_kv])
    assert " per block, in bfloat16" in on_cpu and of_kv.startswith("--kv-cache-dtype auto is bfloat16")
    wide = report("--device", "cpu", "--kv-cache-dtype", "float32")
    assert " per block, in float32" in wide and "--kv-cache-dtype auto" not in wide
    assert "parameters in float32, " + blocks in on_cpu and of_format.startswith("--quantization auto is as-stored")
    in_bfloat16 = report("--device", "cpu", "--dtype", "bfloat16")
    assert blocks not in in_bfloat16 and "auto is none: --dtype bfloat16 requires" in in_bfloat16
