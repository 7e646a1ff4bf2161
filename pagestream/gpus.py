"""The GPUs of this machine, and their assignment to the workers of `serve`.

They are found without CUDA, because the supervisor never loads torch. A worker sees as many GPUs as its tensor-parallel
size, linked by NVLink if possible, otherwise in order. Several workers are several copies of the model.
"""

from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path

from pagestream.nvlink import Links
from pagestream.served_models import ServedModel
from shared.settings import SettingsError

DRIVER_GPUS = Path("/proc/driver/nvidia/gpus")  # one folder per GPU; in a container only its own
VISIBLE = "CUDA_VISIBLE_DEVICES"


def visible_gpus(environ: Mapping[str, str], driver_gpus: Path = DRIVER_GPUS) -> list[str]:
    """Return the entries of CUDA_VISIBLE_DEVICES if it is set, otherwise 0, 1, ... for the driver's GPUs."""
    chosen = environ.get(VISIBLE)
    if chosen is not None:
        return [name.strip() for name in chosen.split(",") if name.strip()]
    return [str(index) for index, _ in enumerate(driver_gpus.iterdir())] if driver_gpus.is_dir() else []


def check_gpus(models: Sequence[ServedModel], gpus: Sequence[str]) -> None:
    """Raise SettingsError if tensor-parallel groups would share a GPU; workers of one GPU may share."""
    wanted = sum(model.num_ranks for model in models)
    if not gpus or wanted <= len(gpus) or all(model.tensor_parallel_size == 1 for model in models):
        return
    groups = " and ".join(f"{model.num_workers} x {model.tensor_parallel_size}" for model in models)
    raise SettingsError(
        f"--workers x --tensor-parallel-size: {groups} need {wanted} GPUs, but there are {len(gpus)}; "
        f"use fewer workers, a smaller group, or --device cpu"
    )


def groups_of_gpus(sizes: Sequence[int], gpus: Sequence[str], links: Links) -> list[list[str]]:
    """Assign `gpus` to workers of the given tensor-parallel sizes.

    The GPUs of a group are all linked by NVLink if possible, otherwise consecutive. If there are more workers of one
    GPU than GPUs, they share in turn. Without GPUs the groups are empty.
    """
    if sum(sizes) > len(gpus):
        return [[gpus[number % len(gpus)]] if gpus else [] for number, _ in enumerate(sizes)]
    left, groups = list(gpus), dict[int, list[str]]()
    for number in sorted(range(len(sizes)), key=lambda number: -sizes[number]):  # small groups must not break links
        groups[number] = _best_group(left, sizes[number], links)
        left = [gpu for gpu in left if gpu not in groups[number]]
    return [groups[number] for number in range(len(sizes))]


def environ_of_worker(group: Sequence[str], environ: Mapping[str, str], gpus: Sequence[str]) -> dict[str, str]:
    """Return the environment in which a worker sees only its `group`; unchanged with one GPU or none."""
    return dict(environ) if len(gpus) <= 1 else {**environ, VISIBLE: ",".join(group)}


def _best_group(gpus: Sequence[str], size: int, links: Links) -> list[str]:
    """Return the first group with the most links inside and the fewest broken links."""

    def num_links(group: Sequence[str]) -> tuple[int, int]:
        inside = sum(frozenset(pair) in links for pair in combinations(group, 2))
        touched = sum(any(gpu in link for gpu in group) for link in links if link <= set(gpus))
        return inside, inside - touched

    if not links or size == 1:
        return list(gpus[:size])
    groups = [list(group) for group in combinations(gpus, size)]
    return max(groups, key=num_links)
