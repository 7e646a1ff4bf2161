"""Check that all ranks of a group load the same model, because each host may have its own directory.

Runs before weights are loaded, with the digests that workers of one queue compare (shared/model_identity.py).
"""

import zlib
from pathlib import Path

from engine_worker.model.tensor_parallel import TensorParallel
from shared.model_identity import files_identity

CONFIG_FILES = ("config.json", "hf_quant_config.json")  # hosts without rank 0 need no tokenizer


def check_same_model(directory: Path, load_format: str, ranks: TensorParallel, setting: str = "--model") -> None:
    """Raise ValueError, which names the setting, on every rank if two ranks have different files."""
    if ranks.size == 1:
        return
    own = zlib.crc32(repr(files_identity(directory, load_format, CONFIG_FILES)).encode())
    if ranks.minimum(own) != -ranks.minimum(-own):
        raise ValueError(
            f"{setting}: the ranks have different files; {directory} of rank {ranks.rank} has the checksum {own:08x}"
        )
