"""Where the model runs if nobody says, and that a CPU is not taken silently."""

import logging

import pytest

from engine_worker.model.devices import check_kv_dtype, chosen_device


@pytest.mark.parametrize(
    ("wanted", "has_cuda", "device", "is_told"),
    [("auto", True, "cuda", False), ("auto", False, "cpu", True), ("cpu", True, "cpu", False)],
)
def test_the_device(wanted: str, has_cuda: bool, device: str, is_told: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "worker")
    assert chosen_device(wanted, has_cuda=has_cuda) == device
    assert ("no CUDA device: the model runs on the CPU" in caplog.text) == is_told


def test_a_gpu_that_is_not_there_is_refused() -> None:
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
def test_caches_that_are_served(kv_dtype: str, model_dtype: str, capability: tuple[int, int] | None) -> None:
    check_kv_dtype(kv_dtype, model_dtype, capability)


def test_a_cache_that_no_kernel_reads_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"--kv-cache-dtype fp8: e4m3 needs .* 8\.9 or more .*; this GPU has 8\.6"):
        check_kv_dtype("float8_e4m3fn", "bfloat16", (8, 6))
    with pytest.raises(ValueError, match="--kv-cache-dtype fp8: on cuda needs --dtype bfloat16 or float16"):
        check_kv_dtype("float8_e4m3fn", "float32", (9, 0))
    with pytest.raises(ValueError, match="--kv-cache-dtype bfloat16: the model computes in float16"):
        check_kv_dtype("bfloat16", "float16", (9, 0))
