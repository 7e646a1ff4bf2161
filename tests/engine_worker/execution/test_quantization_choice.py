"""`--quantization auto`: a CPU with kernels multiplies GGUF blocks directly; otherwise the reason is logged."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine_worker.execution.load.quantization_choice import chosen_quantization
from engine_worker.execution.settings import ExecutionSettings
from engine_worker.model.weight_format import STORED_BLOCKS


def there_are() -> str:
    return ""


def not_asked() -> str:
    raise AssertionError("it may compile the kernels")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / STORED_BLOCKS).touch()
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def chosen(model: Path, why_no_kernels: Callable[[], str] = there_are, device: str = "cpu", **options: Any) -> str:
    return chosen_quantization(ExecutionSettings(model=model, **options), device, why_no_kernels).quantization


def test_quantization_auto_gguf_on_cpu_is_as_stored(model: Path) -> None:
    choice = chosen_quantization(ExecutionSettings(model=model), "cpu", there_are)
    assert (choice.quantization, choice.lacks_kernels) == ("as-stored", False)
    assert choice.reason.startswith("--quantization auto is as-stored: ")


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"dtype": "float32"}, "--dtype float32 requires linear layers of that type"),
        ({"dtype": "bfloat16"}, "--dtype bfloat16 requires linear layers of that type"),
        ({"load_format": "dummy"}, "--load-format dummy does not read the file"),
        ({"model_impl": "transformers"}, "--model-impl transformers does not support it"),
        ({"tensor_parallel_size": 2}, "--tensor-parallel-size over 1 does not support it"),
    ],
)
def test_quantization_auto_conflicting_setting_is_none(model: Path, options: dict[str, Any], why: str) -> None:
    choice = chosen_quantization(ExecutionSettings(model=model, **options), "cpu", not_asked)
    assert (choice.quantization, choice.lacks_kernels) == ("none", False)
    assert choice.reason == f"--quantization auto is none: {why}"


def test_quantization_auto_without_kernels_logs_reason(model: Path) -> None:
    choice = chosen_quantization(ExecutionSettings(model=model), "cpu", lambda: "there is no C++ compiler")
    assert (choice.quantization, choice.lacks_kernels) == ("none", True)
    assert choice.reason.endswith("there is no C++ compiler") and "slower" in choice.reason


def test_quantization_explicit_or_without_blocks_is_kept(model: Path, tmp_path: Path) -> None:
    for flag in ("none", "fp8", "int8", "as-stored"):
        assert chosen(model, not_asked, quantization=flag) == flag
    (model / STORED_BLOCKS).unlink()
    for device in ("cpu", "cuda"):
        assert chosen(tmp_path, not_asked, device) == "auto"


def test_quantization_auto_gguf_on_a_gpu_is_as_stored_in_bfloat16(model: Path) -> None:
    for dtype in ("auto", "bfloat16"):
        assert chosen(model, not_asked, "cuda", dtype=dtype) == "as-stored"
    for other in ({"dtype": "float16"}, {"tensor_parallel_size": 2}):
        assert chosen(model, not_asked, "cuda", **other) == "none"


def test_quantization_auto_multiplies_4_bit_integers(tmp_path: Path) -> None:
    config = {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert chosen(tmp_path) == "as-stored"
    assert chosen(tmp_path, not_asked, dtype="bfloat16") == "none"
    on_gpu = chosen_quantization(ExecutionSettings(model=tmp_path), "cuda", not_asked)
    assert (on_gpu.quantization, on_gpu.reason) == ("auto", "")
    assert chosen(tmp_path, quantization="awq") == "as-stored"
    with pytest.raises(ValueError, match=r"--quantization gptq: the checkpoint has awq int4, groups of 128 weights"):
        chosen(tmp_path, not_asked, quantization="gptq")
