"""pagestream/child_commands.py: several workers on several GPUs, one each."""

from pathlib import Path

import pytest

from pagestream.child_commands import environ_of_worker, visible_gpus


@pytest.mark.parametrize(
    ("environ", "expected"),
    [({}, ["0", "1"]), ({"CUDA_VISIBLE_DEVICES": "3, GPU-8f"}, ["3", "GPU-8f"]), ({"CUDA_VISIBLE_DEVICES": ""}, [])],
    ids=["of the driver", "chosen", "none wanted"],
)
def test_the_gpus_of_a_machine(tmp_path: Path, environ: dict[str, str], expected: list[str]) -> None:
    (tmp_path / "0000:01:00.0").mkdir()
    (tmp_path / "0000:02:00.0").mkdir()
    assert visible_gpus(environ, tmp_path) == expected


def test_a_machine_without_the_driver_has_none(tmp_path: Path) -> None:
    assert visible_gpus({}, tmp_path / "absent") == []


def test_workers_take_the_gpus_in_turn() -> None:
    seen = [environ_of_worker(number, {"A": "b"}, ["4", "7"]) for number in range(3)]
    assert seen == [{"A": "b", "CUDA_VISIBLE_DEVICES": name} for name in ("4", "7", "4")]


@pytest.mark.parametrize("gpus", [[], ["0"]])
def test_one_gpu_or_none_is_nothing_to_share_out(gpus: list[str]) -> None:
    assert environ_of_worker(1, {"A": "b"}, gpus) == {"A": "b"}
