"""The GPUs of this machine, and which of them each worker of `serve` sees.

They are found without CUDA, because the supervisor never loads torch. A worker sees as many as share its model, one
after another as the machine numbers them: several workers are several copies of the model on as many GPUs.

It is used at a start and after each death, for all_in_one.py and child_commands.py. It knows no worker's options.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

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


def environ_of_worker(first: int, size: int, environ: Mapping[str, str], gpus: Sequence[str]) -> dict[str, str]:
    """Return a worker's environment: `size` GPUs, behind the `first` that others have; unchanged where there is one."""
    if len(gpus) <= 1:
        return dict(environ)
    return {**environ, VISIBLE: ",".join(gpus[(first + index) % len(gpus)] for index in range(size))}
