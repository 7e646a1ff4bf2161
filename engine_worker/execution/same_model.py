"""Whether all ranks of a group see one model: of several hosts each may have a directory of its own.

It is asked at a start, before weights are read. It reads config.json and the names and sizes of weight files.
"""

import zlib
from pathlib import Path

from engine_worker.model.tensor_parallel import TensorParallel


def check_same_model(directory: Path, ranks: TensorParallel) -> None:
    """Raise ValueError on every rank where two ranks have different files."""
    if ranks.size == 1:
        return
    own = fingerprint(directory)
    if ranks.minimum(own) != -ranks.minimum(-own):
        raise ValueError(
            f"the ranks have different models: {directory} of rank {ranks.rank} has the checksum {own:08x}"
        )


def fingerprint(directory: Path) -> int:
    """A checksum of config.json, and of the names and sizes of weight files."""
    sizes = sorted((path.name, path.stat().st_size) for path in directory.glob("*.safetensors"))
    return zlib.crc32(repr(sizes).encode(), zlib.crc32((directory / "config.json").read_bytes()))
