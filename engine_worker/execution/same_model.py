"""Whether all ranks of a group see one model: of several hosts each may have a directory of its own.

It is asked at a start, before weights are read. It reads what says how weights are read (config.json, and modelopt's
file beside it), and the names and sizes of weight files. It knows no value of a weight.
"""

import zlib
from pathlib import Path

from engine_worker.model.tensor_parallel import TensorParallel

_CONFIGS = ("config.json", "hf_quant_config.json")


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
    """A checksum of the configurations, and of the names and sizes of weight files."""
    configs = [(path.name, path.read_bytes()) for name in _CONFIGS if (path := directory / name).is_file()]
    sizes = sorted((path.name, path.stat().st_size) for path in directory.glob("*.safetensors"))
    return zlib.crc32(repr((configs, sizes)).encode())
