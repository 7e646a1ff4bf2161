"""The GPUs of this machine, and which of them each worker of `serve` sees.

They are found without CUDA, because the supervisor never loads torch. A worker sees as many as share its model, linked
by NVLink where there are such, else one after another as the machine numbers them: several workers are several copies
of the model on as many GPUs.

It is used at a start and after each death, for all_in_one.py and child_commands.py. It knows no worker's options.
"""

from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path

from pagestream.nvlink import Links
from pagestream.served_models import ServedModel
from shared.settings import SettingsError

DRIVER_GPUS = Path("/proc/driver/nvidia/gpus")  # one folder a GPU; in a container only those it was given
VISIBLE = "CUDA_VISIBLE_DEVICES"


def visible_gpus(environ: Mapping[str, str], driver_gpus: Path = DRIVER_GPUS) -> list[str]:
    """Names as CUDA_VISIBLE_DEVICES has them: its own entries if it is set, else 0, 1, ... for those of the driver."""
    chosen = environ.get(VISIBLE)
    if chosen is not None:
        return [name.strip() for name in chosen.split(",") if name.strip()]
    return [str(index) for index, _ in enumerate(driver_gpus.iterdir())] if driver_gpus.is_dir() else []


def check_gpus(models: Sequence[ServedModel], gpus: Sequence[str]) -> None:
    """Raise SettingsError where groups of GPUs would share one. Workers of one GPU may: they take them in turn."""
    wanted = sum(model.num_ranks for model in models)
    if not gpus or wanted <= len(gpus) or all(model.tensor_parallel_size == 1 for model in models):
        return
    groups = " and ".join(f"{model.num_workers} x {model.tensor_parallel_size}" for model in models)
    raise SettingsError(
        f"--workers x --tensor-parallel-size: {groups} take {wanted} GPUs, and there are {len(gpus)}; "
        f"give fewer workers or a smaller group, or --device cpu"
    )


def groups_of_gpus(sizes: Sequence[int], gpus: Sequence[str], links: Links) -> list[list[str]]:
    """Share `gpus` out to workers of `sizes`: those of a group are all linked where that can be, and in order else.

    More workers than GPUs, of one each, take them in turn. None where there is none.
    """
    if sum(sizes) > len(gpus):
        return [[gpus[number % len(gpus)]] if gpus else [] for number, _ in enumerate(sizes)]
    left, groups = list(gpus), dict[int, list[str]]()
    for number in sorted(range(len(sizes)), key=lambda number: -sizes[number]):  # small ones do not break links
        groups[number] = _best_group(left, sizes[number], links)
        left = [gpu for gpu in left if gpu not in groups[number]]
    return [groups[number] for number in range(len(sizes))]


def environ_of_worker(group: Sequence[str], environ: Mapping[str, str], gpus: Sequence[str]) -> dict[str, str]:
    """Return a worker's environment: it sees its `group` of `gpus`. Unchanged where there is nothing to share out."""
    return dict(environ) if len(gpus) <= 1 else {**environ, VISIBLE: ",".join(group)}


def _best_group(gpus: Sequence[str], size: int, links: Links) -> list[str]:
    """The first of those that have the most links among them, and of those the one that breaks the fewest."""

    def num_links(group: Sequence[str]) -> tuple[int, int]:
        inside = sum(frozenset(pair) in links for pair in combinations(group, 2))
        touched = sum(any(gpu in link for gpu in group) for link in links if link <= set(gpus))
        return inside, inside - touched

    if not links or size == 1:
        return list(gpus[:size])
    groups = [list(group) for group in combinations(gpus, size)]
    return max(groups, key=num_links)
