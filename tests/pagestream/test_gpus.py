"""Several workers on several GPUs: one GPU each, or a group each."""

from itertools import combinations
from pathlib import Path

import pytest

from pagestream.gpus import check_gpus, environ_of_worker, groups_of_gpus, visible_gpus
from pagestream.nvlink import Links
from pagestream.served_models import ServedModel, find_model
from shared.models_file import ModelEntry
from shared.settings import SettingsError


@pytest.mark.parametrize(
    ("environ", "expected"),
    [({}, ["0", "1"]), ({"CUDA_VISIBLE_DEVICES": "3, GPU-8f"}, ["3", "GPU-8f"]), ({"CUDA_VISIBLE_DEVICES": ""}, [])],
    ids=["of the driver", "chosen", "none wanted"],
)
def test_gpus_of_the_machine_are_listed(tmp_path: Path, environ: dict[str, str], expected: list[str]) -> None:
    (tmp_path / "0000:01:00.0").mkdir()
    (tmp_path / "0000:02:00.0").mkdir()
    assert visible_gpus(environ, tmp_path) == expected


def test_a_machine_without_the_driver_has_none(tmp_path: Path) -> None:
    assert visible_gpus({}, tmp_path / "absent") == []


def environs(sizes: list[int], gpus: list[str], links: Links = ()) -> list[dict[str, str]]:
    return [environ_of_worker(group, {"A": "b"}, gpus) for group in groups_of_gpus(sizes, gpus, links)]


def seen(sizes: list[int], gpus: list[str], links: Links = ()) -> list[str]:
    return [environ["CUDA_VISIBLE_DEVICES"] for environ in environs(sizes, gpus, links)]


def test_workers_take_gpus_in_turn() -> None:
    assert environs([1, 1, 1], ["4", "7"]) == [{"A": "b", "CUDA_VISIBLE_DEVICES": name} for name in ("4", "7", "4")]


@pytest.mark.parametrize("gpus", [[], ["0"]])
def test_one_gpu_or_none_is_not_divided(gpus: list[str]) -> None:
    assert environs([1, 1], gpus) == [{"A": "b"}] * 2


def test_group_takes_one_gpu_per_rank() -> None:
    assert seen([2, 2], ["0", "1", "2", "GPU-8f"]) == ["0,1", "2,GPU-8f"]


LINKS = {frozenset(pair.split()) for pair in ("0 3", "1 2")}
OF_FOUR = {frozenset(pair) for half in ("0145", "2367") for pair in combinations(half, 2)}


@pytest.mark.parametrize(
    ("sizes", "num_gpus", "links", "expected"),
    [
        ([2, 2], 4, LINKS, ["0,3", "1,2"]),
        ([1, 2], 4, LINKS, ["1", "0,3"]),
        ([1, 1, 2], 4, LINKS, ["1", "2", "0,3"]),
        ([4, 4], 8, OF_FOUR, ["0,1,4,5", "2,3,6,7"]),
        ([2, 2, 4], 8, OF_FOUR, ["2,3", "6,7", "0,1,4,5"]),
        ([4], 4, LINKS, ["0,1,2,3"]),
        ([3], 4, {frozenset("12"), frozenset("23"), frozenset("13")}, ["1,2,3"]),
        ([2], 3, {frozenset("01"), frozenset("12")}, ["0,1"]),
    ],
)
def test_group_prefers_linked_gpus(sizes: list[int], num_gpus: int, links: Links, expected: list[str]) -> None:
    assert seen(sizes, [str(index) for index in range(num_gpus)], links) == expected


def served(tmp_path: Path, num_workers: int, size: int) -> ServedModel:
    (tmp_path / "config.json").touch()
    source = find_model(str(tmp_path), "main")
    return ServedModel(("m",), source, ModelEntry(model="m"), num_workers, (), size)


@pytest.mark.parametrize(
    ("workers", "num_gpus"),
    [([(2, 2)], 4), ([(2, 2)], 0), ([(3, 1)], 2), ([(1, 2), (2, 1)], 4)],
    ids=["as many as there are", "a CPU", "one each, in turn", "two models"],
)
def test_workers_with_gpus_are_counted(tmp_path: Path, workers: list[tuple[int, int]], num_gpus: int) -> None:
    check_gpus([served(tmp_path, *each) for each in workers], [str(index) for index in range(num_gpus)])


@pytest.mark.parametrize(
    ("workers", "message"),
    [([(2, 2)], "2 x 2 need 4 GPUs, but there are 3"), ([(1, 2), (2, 1)], "1 x 2 and 2 x 1 need 4 GPUs")],
)
def test_groups_that_would_share_a_gpu_are_refused(
    tmp_path: Path, workers: list[tuple[int, int]], message: str
) -> None:
    with pytest.raises(SettingsError, match=message):
        check_gpus([served(tmp_path, *each) for each in workers], ["0", "1", "2"])
