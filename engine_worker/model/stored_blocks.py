"""Read stored_blocks.safetensors: blocks of a GGUF file's tensors (made by gguf/stored_blocks.py).

ggml's blocks of 32 numbers: a float16 scale; in Q4_1 a float16 minimum; then 32 int8, or 16 bytes whose low nibbles are
the first 16 numbers. Source: ggml-common.h, block_q4_0, block_q4_1, block_q8_0.
"""

from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from kernels.cpu.linear import GROUP, GroupedWeight, GroupFormat

_FORMATS = {"Q4_0": GroupFormat.INT4_ZERO_8, "Q4_1": GroupFormat.INT4_MINIMUM, "Q8_0": GroupFormat.INT8}
_SCALE_BYTES = 2


class StoredBlocks:
    """The blocks of a model's tensors."""

    def __init__(self, path: Path) -> None:
        self._file = safe_open(path, framework="pt")
        self._types: dict[str, str] = self._file.metadata() or {}

    def type_of(self, name: str) -> str:
        """Return ggml's name of a tensor's blocks, or an empty string if it is not stored."""
        return self._types.get(name, "")

    def get(self, name: str, shape: tuple[int, int]) -> GroupedWeight | None:
        """Return a tensor's blocks, or None if it is not stored.

        Raises:
            ValueError: If its shape is not `shape`.
        """
        format_ = _FORMATS.get(self.type_of(name))
        if format_ is None:
            return None
        rows = self._file.get_tensor(name)
        blocks = _blocks(rows, shape[1] // GROUP, format_) if shape[1] % GROUP == 0 else None
        if blocks is None or len(rows) != shape[0]:
            raise ValueError(f"{name} has {tuple(rows.shape)} bytes of blocks; config.json requires shape {shape}")
        return _grouped(blocks, format_)


def _blocks(rows: Tensor, groups: int, format_: GroupFormat) -> Tensor | None:
    """Split rows into [N, groups, bytes per block], or return None for another length."""
    scales = 2 if format_ is GroupFormat.INT4_MINIMUM else 1
    size = scales * _SCALE_BYTES + (GROUP if format_ is GroupFormat.INT8 else GROUP // 2)
    return rows.unflatten(1, (groups, size)) if rows.shape[1] == groups * size else None


def _grouped(blocks: Tensor, format_: GroupFormat) -> GroupedWeight:
    """Split blocks into scales, minima and quants, two bytes at a time, because all offsets are even."""
    pairs = blocks.view(torch.int16)
    scales = pairs[..., 0].contiguous().view(torch.float16)
    minima = pairs[..., 1].contiguous().view(torch.float16) if format_ is GroupFormat.INT4_MINIMUM else None
    quants = pairs[..., 1 if minima is None else 2 :].contiguous()
    return GroupedWeight(
        format_, quants.view(torch.int8 if format_ is GroupFormat.INT8 else torch.uint8), scales, minima
    )
