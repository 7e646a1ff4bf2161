"""The GPUs that this machine's driver lets us use, found without CUDA: the supervisor never loads torch.

Each worker sees one of them alone, so that several workers are several copies of the model on as many GPUs.
"""

from collections.abc import Mapping
from pathlib import Path

DRIVER_GPUS = Path("/proc/driver/nvidia/gpus")  # one folder a GPU; in a container only those it was given
VISIBLE = "CUDA_VISIBLE_DEVICES"


def visible_gpus(environ: Mapping[str, str], driver_gpus: Path = DRIVER_GPUS) -> list[str]:
    """Names as CUDA_VISIBLE_DEVICES has them: its own entries if it is set, else 0, 1, ... for those of the driver."""
    chosen = environ.get(VISIBLE)
    if chosen is not None:
        return [name.strip() for name in chosen.split(",") if name.strip()]
    return [str(index) for index, _ in enumerate(driver_gpus.iterdir())] if driver_gpus.is_dir() else []


def environ_of_worker(number: int, environ: Mapping[str, str], gpus: list[str]) -> dict[str, str]:
    """That of worker `number`: in turn one GPU of several, else as it is."""
    return {**environ, VISIBLE: gpus[number % len(gpus)]} if len(gpus) > 1 else dict(environ)
