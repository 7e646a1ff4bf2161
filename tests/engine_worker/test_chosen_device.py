"""Where the model runs if nobody says, and that a CPU is not taken silently."""

import logging

import pytest

from engine_worker.model.devices import chosen_device


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
