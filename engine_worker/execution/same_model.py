"""Whether all ranks of a group see one model: of several hosts each may have a directory of its own.

It is asked at a start, before weights are read. It reads config.json, and of weight files names, sizes and some pages:
of two models that were trained from one, almost all weights differ.
"""

import os
import zlib
from pathlib import Path

from engine_worker.model.tensor_parallel import TensorParallel

_NUM_PAGES, _PAGE_BYTES = 32, 4096  # of each file: a tenth of a second of a disk for 30 files


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
    """Return a checksum of config.json, and of weight files: names, sizes, and pages at equal distances."""
    checksum = zlib.crc32((directory / "config.json").read_bytes())
    for path in sorted(directory.glob("*.safetensors")):
        size = path.stat().st_size
        checksum = zlib.crc32(f"{path.name} {size}".encode(), checksum)
        with path.open("rb", buffering=0) as file:
            for number in range(_NUM_PAGES):
                checksum = zlib.crc32(os.pread(file.fileno(), _PAGE_BYTES, size * number // _NUM_PAGES), checksum)
    return checksum
