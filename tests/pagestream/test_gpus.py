"""pagestream/gpus.py: several workers on several GPUs, one each or a group each."""

from pathlib import Path

import pytest

from pagestream.gpus import check_gpus, environ_of_worker, visible_gpus
from pagestream.model_source import find_model
from pagestream.served_models import ServedModel
from shared.models_file import ModelEntry
from shared.settings import SettingsError


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
    seen = [environ_of_worker(number, 1, {"A": "b"}, ["4", "7"]) for number in range(3)]
    assert seen == [{"A": "b", "CUDA_VISIBLE_DEVICES": name} for name in ("4", "7", "4")]


@pytest.mark.parametrize("gpus", [[], ["0"]])
def test_one_gpu_or_none_is_nothing_to_share_out(gpus: list[str]) -> None:
    assert environ_of_worker(1, 1, {"A": "b"}, gpus) == {"A": "b"}


def test_a_group_takes_as_many_as_share_its_model() -> None:
    gpus = ["0", "1", "2", "GPU-8f"]
    assert [environ_of_worker(first, 2, {}, gpus) for first in (0, 2)] == [
        {"CUDA_VISIBLE_DEVICES": "0,1"},
        {"CUDA_VISIBLE_DEVICES": "2,GPU-8f"},
    ]


def served(tmp_path: Path, num_workers: int, size: int) -> ServedModel:
    (tmp_path / "config.json").touch()
    source = find_model(str(tmp_path), "main")
    return ServedModel(("m",), source, ModelEntry(model="m"), num_workers, (), size)


@pytest.mark.parametrize(
    ("workers", "num_gpus"),
    [([(2, 2)], 4), ([(2, 2)], 0), ([(3, 1)], 2), ([(1, 2), (2, 1)], 4)],
    ids=["as many as there are", "a CPU", "one each, in turn", "two models"],
)
def test_workers_that_have_gpus(tmp_path: Path, workers: list[tuple[int, int]], num_gpus: int) -> None:
    check_gpus([served(tmp_path, *each) for each in workers], [str(index) for index in range(num_gpus)])


@pytest.mark.parametrize(
    ("workers", "told"),
    [([(2, 2)], "2 x 2 take 4 GPUs, and there are 3"), ([(1, 2), (2, 1)], "1 x 2 and 2 x 1 take 4 GPUs")],
)
def test_groups_that_would_share_a_gpu_are_refused(tmp_path: Path, workers: list[tuple[int, int]], told: str) -> None:
    with pytest.raises(SettingsError, match=told):
        check_gpus([served(tmp_path, *each) for each in workers], ["0", "1", "2"])
