"""Where the model runs if nobody says, and that a CPU is not taken silently."""

import logging

import pytest

from engine_worker.__main__ import chosen_device


@pytest.mark.parametrize(
    ("wanted", "has_cuda", "device", "is_told"),
    [
        ("auto", True, "cuda", False),
        ("auto", False, "cpu", True),
        ("cpu", True, "cpu", False),
        ("cuda", False, "cuda", False),  # the loader refuses it
    ],
)
def test_the_device(wanted: str, has_cuda: bool, device: str, is_told: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "worker")
    assert chosen_device(wanted, has_cuda=has_cuda) == device
    assert ("no CUDA device: the model runs on the CPU" in caplog.text) == is_told
