"""Unsupported fp8 checkpoints are refused with a sentence that names the format, type, shape or scale."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine_worker.estimate import main as estimate
from engine_worker.model.devices import check_weight_format
from engine_worker.model.implementation import blueprint_from_directory
from engine_worker.model.preflight import check_files
from tests.engine_worker.model import int4_checkpoints
from tests.engine_worker.model.fp8_checkpoints import LAYOUTS, PER_TOKEN, STATIC, Fp8Model, compressed, write_fp8
from tests.engine_worker.model.int4_checkpoints import AWQ, gptq

GATE = "model.layers.1.mlp.gate_proj"
COMPRESSED = "quantization_config (compressed-tensors) with "
FINE = "quantization_config (fp8) with "


GPTQ = "quantization_config (gptq) with "


def int4(**weights: Any) -> dict[str, Any]:
    return {**compressed("group", PER_TOKEN, num_bits=4, type="int", group_size=128, **weights)}


def w4a16(group: int, **weights: Any) -> dict[str, Any]:
    return int4_checkpoints.compressed(group, symmetric=True, **weights)


CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "another method": ({"quant_method": "hqq", "bits": 4}, "('hqq') is not supported; supported: awq, compressed-"),
    "no method": ({"bits": 4}, "quantization_config (None) is not supported"),
    "a method that is no word": ({"quant_method": ["fp8"]}, "(['fp8']) is not supported"),
    "int4 with quantized inputs": (int4(), COMPRESSED + "input_activations of 8 bits beside weights of 4 bits"),
    "int4 in groups of 48": (w4a16(48), COMPRESSED + "weights with strategy 'group' and group_size 48"),
    "int4, reordered": (w4a16(128, actorder="group"), COMPRESSED + "actorder 'group', which reorders inputs"),
    "int3": (w4a16(128, num_bits=3), COMPRESSED + "weights of 3 bits (int)"),
    "gptq, 8 bits": (gptq(128, bits=8), GPTQ + "bits = 8 is not supported; supported: 4"),
    "gptq, groups of 48": (gptq(48), GPTQ + "group_size = 48 is not supported; supported: -1, or a multiple of 32"),
    "gptq, several formats": (gptq(128, dynamic={"x": {}}), GPTQ + "dynamic (formats of single modules)"),
    "gptq, another layout": (gptq(128, checkpoint_format="marlin"), GPTQ + "checkpoint_format = 'marlin'"),
    "awq, gemv": ({**AWQ, "version": "gemv"}, "quantization_config (awq) with version = 'gemv'"),
    "awq, groups do not divide": ({**AWQ, "group_size": 224}, "(awq): a linear layer has 160 inputs, which is not a"),
    "nvfp4": ({**compressed("tensor_group", PER_TOKEN, num_bits=4), "format": "nvfp4-pack-quantized"}, "nvfp4"),
    "int8": (compressed("channel", PER_TOKEN, type="int"), COMPRESSED + "weights of 8 bits (int)"),
    "weights alone": (
        {**compressed("channel", PER_TOKEN), "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}}},
        COMPRESSED + "no input_activations",
    ),
    "other blocks": (compressed("block", PER_TOKEN, block_structure=[64, 64]), "strategy 'block' of [64, 64]"),
    "groups": (compressed("group", PER_TOKEN, group_size=32), "weights with strategy 'group'"),
    "no groups": ({**compressed("channel", PER_TOKEN), "config_groups": {}}, COMPRESSED + "config_groups = {}"),
    "static inputs by token": (
        compressed("channel", {**PER_TOKEN, "dynamic": False}), "input_activations that are static with strategy"
    ),
    "rotated": ({**compressed("channel", PER_TOKEN), "transform_config": {"config_groups": {"R1": {}}}}, "transform_"),
    "sparse": ({**compressed("channel", PER_TOKEN), "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_c"),
    "a pattern that is none": ({**compressed("tensor", STATIC), "ignore": ["re:("]}, "'re:(', which is not a valid"),
    "names that are none": ({**compressed("tensor", STATIC), "ignore": "lm_head"}, "ignore must be a list of module"),
    "e5m2": ({"quant_method": "fp8", "fmt": "e5m2"}, FINE + "fmt = 'e5m2'"),
    "blocks of 64": ({"quant_method": "fp8", "weight_block_size": [64, 64]}, FINE + "weight_block_size = [64, 64]"),
    "static blocks": (
        {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "static"},
        FINE + "activation_scheme = 'static' and blocks",
    ),
    "another scheme": ({"quant_method": "fp8", "activation_scheme": "mixed"}, FINE + "activation_scheme = 'mixed'"),
    "modelopt's nvfp4": ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "quant_algo = 'NVFP4' is not supp"),
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Fp8Model:
    return write_fp8(tmp_path_factory.mktemp("fp8"), LAYOUTS["compressed-tensors, rows"])


def written(model: Fp8Model, directory: Path, quantization: dict[str, Any] | None = None) -> Path:
    """Write the model with another quantization_config; its files are links."""
    directory.mkdir()
    (directory / "model.safetensors").symlink_to(model.directory / "model.safetensors")
    config = json.loads((model.directory / "config.json").read_text())
    if quantization is not None:
        config["quantization_config"] = quantization
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize("name", CONFIGS)
def test_unsupported_quantization_format_is_refused(
    name: str, model: Fp8Model, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    quantization, sentence = CONFIGS[name]
    directory = written(model, tmp_path / "model", quantization)
    with pytest.raises(ValueError, match=r"config\.json: ") as caught:
        check_files(directory)
    assert sentence in str(caught.value) and "\n" not in str(caught.value) and len(str(caught.value)) < 500
    assert estimate([str(directory)]) == 1
    assert sentence in capsys.readouterr().err


def without(name: str) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.pop(name)


def instead(name: str, tensor: Tensor) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.update({name: tensor})


SCALE = f"{GATE}.weight_scale"
TENSORS: dict[str, tuple[str, Callable[[dict[str, Tensor]], object], str]] = {
    "no scales": ("compressed-tensors, rows", without(SCALE), f"have no {SCALE}, required by config.json in"),
    "no input scale": (
        "modelopt", without(f"{GATE}.input_scale"), f"have no {GATE}.input_scale, required by config.json in mo"
    ),
    "scales of too few rows": (
        "compressed-tensors, rows", instead(SCALE, torch.ones(255, 1)), "shape (255, 1); config.json requires (256,)"
    ),
    "one scale for all": ("compressed-tensors, rows", instead(SCALE, torch.ones(1)), "shape (1,); config.json req"),
    "scales of rows for blocks": (
        "fp8, blocks", instead(f"{GATE}.weight_scale_inv", torch.ones(256, 1)),
        "has shape (256, 1); config.json requires (2, 2)",
    ),
    "16 bits": (
        "compressed-tensors, rows", instead(f"{GATE}.weight", torch.ones(256, 160)),
        f"{GATE}.weight is F32 in model.safetensors; compressed-tensors fp8 requires F8_E4M3",
    ),
    "e5m2": (
        "compressed-tensors, rows", instead(f"{GATE}.weight", torch.ones(256, 160).to(torch.float8_e5m2)),
        f"{GATE}.weight is F8_E5M2 in model.safetensors; compressed-tensors fp8 requires F8_E4M3",
    ),
    "scales of fp8": (
        "compressed-tensors, rows", instead(SCALE, torch.ones(256, 1).to(torch.float8_e4m3fn)),
        f"{SCALE} is F8_E4M3 in model.safetensors; supported: F32, F16, BF16",
    ),
    "a zero point": (
        "compressed-tensors, rows", instead(f"{GATE}.weight_zero_point", torch.ones(256, 1)), "does not use "
    ),
}  # fmt: skip


def changed(model: Fp8Model, change: Callable[[dict[str, Tensor]], object]) -> Path:
    tensors = load_file(model.directory / "model.safetensors")
    change(tensors)
    save_file(tensors, model.directory / "model.safetensors")
    return model.directory


@pytest.mark.parametrize("name", TENSORS)
def test_invalid_fp8_tensor_is_refused_before_loading(name: str, tmp_path: Path) -> None:
    layout, change, sentence = TENSORS[name]
    directory = changed(write_fp8(tmp_path, LAYOUTS[layout]), change)
    with pytest.raises(ValueError, match="model") as caught:
        check_files(directory)
    assert sentence in str(caught.value)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -0.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("layout", "scale"), [("compressed-tensors, rows", SCALE), ("fp8, tensors, static", f"{GATE}.input_scale")]
)
def test_invalid_scales_are_refused_before_loading(
    layout: str, scale: str, dtype: torch.dtype, value: float, tmp_path: Path
) -> None:
    def spoil(tensors: dict[str, Tensor]) -> None:
        tensors[scale] = tensors[scale].to(dtype)
        tensors[scale].view(-1)[-1] = value

    directory = changed(write_fp8(tmp_path, LAYOUTS[layout]), spoil)
    with pytest.raises(ValueError, match=rf"{scale} has {value} in model.safetensors; scales must be finite"):
        check_files(directory)


def test_gpu_without_fp8_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    gpu, bf16 = torch.device("cuda", 0), torch.bfloat16
    with pytest.raises(ValueError, match=r"NVIDIA A100 \(sm_80\) does not support fp8, which needs sm_89"):
        check_weight_format("compressed-tensors fp8", "fp8", gpu, bf16)
    check_weight_format("", "", gpu, bf16)
    check_weight_format("compressed-tensors fp8", "fp8", torch.device("cpu"), bf16)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    check_weight_format("compressed-tensors fp8", "fp8", gpu, bf16)
    with pytest.raises(ValueError, match=r"does not support mxfp4, which needs sm_90 \(Hopper\)"):
        check_weight_format("mxfp4", "mxfp4", gpu, bf16)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    check_weight_format("mxfp4", "mxfp4", gpu, bf16)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_fp8_with_another_dtype_is_refused(dtype: torch.dtype) -> None:
    """Linear layers in fp8 are bfloat16 on CUDA; a CPU dequantizes to any dtype."""
    dtype_name = str(dtype).removeprefix("torch.")
    with pytest.raises(
        ValueError, match=rf"fp8 linear layers on cuda need --dtype bfloat16, and the model is {dtype_name}"
    ):
        check_weight_format("modelopt FP8", "fp8", torch.device("cuda", 0), dtype)
    check_weight_format("modelopt FP8", "fp8", torch.device("cpu"), dtype)
    check_weight_format("", "", torch.device("cuda", 0), dtype)


def test_transformers_backend_refuses_fp8(model: Fp8Model, tmp_path: Path) -> None:
    directory = written(model, tmp_path / "model")
    for refused in (check_files, blueprint_from_directory):
        with pytest.raises(
            ValueError, match="quantization_config is not supported with this model: only natively implemented models"
        ):
            refused(directory, "transformers")
    with pytest.raises(ValueError, match="--quantization fp8: only natively implemented models"):
        check_files(model.exact, "transformers", quantization="fp8")
