"""Device selection: `auto` prefers CUDA, a fallback to the CPU is logged, and unsupported KV dtypes are refused."""

import logging

import pytest

from engine_worker.model.devices import check_kv_dtype, chosen_device


@pytest.mark.parametrize(
    ("wanted", "has_cuda", "device", "is_logged"),
    [("auto", True, "cuda", False), ("auto", False, "cpu", True), ("cpu", True, "cpu", False)],
)
def test_device_auto_selects_cuda_or_logs_cpu(
    wanted: str, has_cuda: bool, device: str, is_logged: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "worker")
    assert chosen_device(wanted, has_cuda=has_cuda) == device
    assert ("no CUDA device: the model runs on the CPU" in caplog.text) == is_logged


def test_device_cuda_without_gpu_is_refused() -> None:
    with pytest.raises(ValueError, match="--device cuda: torch sees no CUDA device"):
        chosen_device("cuda", has_cuda=False)


@pytest.mark.parametrize(
    ("kv_dtype", "model_dtype", "capability"),
    [
        ("bfloat16", "bfloat16", (8, 0)),
        ("float8_e4m3fn", "bfloat16", (8, 9)),
        ("float8_e4m3fn", "float16", (9, 0)),
        ("float8_e4m3fn", "float32", None),
        ("bfloat16", "float32", None),
    ],
)
def test_kv_dtype_supported_combination_is_accepted(
    kv_dtype: str, model_dtype: str, capability: tuple[int, int] | None
) -> None:
    check_kv_dtype(kv_dtype, model_dtype, capability)


def test_kv_dtype_unsupported_names_the_flag() -> None:
    with pytest.raises(ValueError, match=r"--kv-cache-dtype fp8: e4m3 needs .* 8\.9 or more .*; this GPU has 8\.6"):
        check_kv_dtype("float8_e4m3fn", "bfloat16", (8, 6))
    with pytest.raises(ValueError, match="--kv-cache-dtype fp8: on cuda needs --dtype bfloat16 or float16"):
        check_kv_dtype("float8_e4m3fn", "float32", (9, 0))
    with pytest.raises(ValueError, match="--kv-cache-dtype bfloat16: the model computes in float16"):
        check_kv_dtype("bfloat16", "float16", (9, 0))
