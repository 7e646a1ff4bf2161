"""Sources of weights: safetensors files, random numbers, or a rank's part of either.

A source returns each tensor on its device and in its dtype, after checking name and shape.
"""

import math
import re
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from torch import Tensor

from engine_worker.model.checkpoint import StoredTensor, is_ignored, is_shape, stored_tensors
from engine_worker.model.specs.part import NOTHING, Part, Shape
from engine_worker.model.stored_blocks import StoredBlocks
from engine_worker.model.weight_format import GPTQ_ZEROS, INT4_ZEROS, MXFP4_SCALES, STORED_BLOCKS
from engine_worker.model.weight_upload import uploader

# Random fp8 weights with deviation 0.02 are 82 in e4m3, whose maximum is 448.
_RANDOM_SCALE = 2.0**-12
# Random e2m1 values have the deviation 2.9; with 2^-7 it is 0.023. An e8m0 scale is the exponent plus 127.
_RANDOM_E8M0 = 120
_RANDOM_ZEROS = 0x77777777  # zero points of 7, near the middle of 0 to 15

Report = Callable[[float, str], None]  # progress 0..1, current activity


class WeightSource(Protocol):
    """Where a network gets its weights."""

    device: torch.device
    names: Collection[str]  # available names; empty if every name has a tensor

    dtype: torch.dtype  # default dtype of get()

    @property
    def loaded_bytes(self) -> int:
        """Bytes of all tensors returned, as they are kept."""

    def get(
        self, name: str, shape: tuple[int, ...], part: Part | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        """Return a tensor, or a part of it.

        Args:
            name: Name in the checkpoint.
            shape: Expected shape of the whole tensor.
            part: The part to read; default: all.
            dtype: Dtype, for fp8 weights and their scales; default: that of the source.
        """

    def keep_as(self, handed_out: int, kept: int) -> None:
        """Record that `handed_out` bytes were replaced by `kept` bytes."""

    def leave(self, name: str) -> None:
        """Record that a tensor is not read, because another file has it, or another rank needs it."""

    def check_all_used(self, ignored: Sequence[str] = ()) -> None:
        """Check that all tensors were used, except names that match `ignored`."""


class SafetensorsWeights:
    """The safetensors files of a model directory, or their tensors with a prefix."""

    def __init__(
        self, directory: Path, device: torch.device, dtype: torch.dtype, report: Report, under: str = ""
    ) -> None:
        self.device = device
        self.dtype = dtype
        self._upload, self._report = uploader(device), report
        self._stored = stored_tensors(directory, under)
        self._files = {path: _opened(path) for path in {tensor.path for tensor in self._stored.values()}}
        self.names: Collection[str] = frozenset(self._stored)
        self._unused = set(self._stored)
        self._total_bytes = sum(path.stat().st_size for path in self._files)
        self._passed_bytes = 0
        self.read_bytes = 0  # read from the files
        self._reported_percent = 0
        self.loaded_bytes = 0

    def get(
        self, name: str, shape: tuple[int, ...], part: Part | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        stored = self._stored.get(name)
        if stored is None:
            raise ValueError(f"the safetensors files have no {name}")
        if not is_shape(stored.shape, shape, is_scale=dtype is not None):
            raise ValueError(f"{name} has shape {stored.shape}; config.json requires {shape}")
        tensor = self._read(stored, part).reshape(shape if part is None else part.shape(shape))
        self._unused.discard(name)
        self.read_bytes += tensor.nbytes
        self._passed_bytes += math.prod(shape) * tensor.itemsize
        self._report_progress()
        tensor = self._upload(tensor).to(dtype or self.dtype)
        self.loaded_bytes += tensor.nbytes
        return tensor

    def keep_as(self, handed_out: int, kept: int) -> None:
        self.loaded_bytes += kept - handed_out

    def leave(self, name: str) -> None:
        self._unused.discard(name)

    def _read(self, stored: StoredTensor, part: Part | None) -> Tensor:
        """Read only the requested bytes, because the files are mapped. Blocks are dequantized."""
        file = self._files[stored.path]
        if isinstance(file, StoredBlocks):
            rows, columns = stored.shape
            blocks = file.get(stored.name, (rows, columns))
            assert blocks is not None, "listed by stored_tensors()"
            values = blocks.values()
            return values if part is None else _taken(values, part)
        if part is None:
            whole: Tensor = file.get_tensor(stored.name)
            return whole
        return _taken(file.get_slice(stored.name), part)

    def check_all_used(self, ignored: Sequence[str] = ()) -> None:
        """Refuse unused tensors (a bias, an adapter), which would otherwise be dropped silently."""
        unused = sorted(name for name in self._unused if not is_ignored(name))
        unused = [name for name in unused if not any(re.search(pattern, name) for pattern in ignored)]
        if unused:
            names = ", ".join(unused[:4])
            raise ValueError(f"the checkpoint has {len(unused)} weights that this network does not use: {names}")

    def _report_progress(self) -> None:
        percent = self._passed_bytes * 100 // self._total_bytes
        if percent >= self._reported_percent + 10:
            self._reported_percent = percent
            self._report(percent / 100, f"{self._passed_bytes / 2**20:,.0f} of {self._total_bytes / 2**20:,.0f} MiB")


def _opened(path: Path) -> Any:
    return StoredBlocks(path) if path.name == STORED_BLOCKS else safe_open(path, framework="pt")


class ShardedWeights:
    """One rank's parts of the tensors of `source`, requested by their shapes on the rank."""

    def __init__(self, source: WeightSource, shapes: Mapping[str, Shape], parts: Mapping[str, Part]) -> None:
        """Wrap a source; `shapes` are those of the whole tensors, by name."""
        self._source, self._shapes, self._parts = source, shapes, parts
        self.device, self.dtype, self.names = source.device, source.dtype, source.names

    @property
    def loaded_bytes(self) -> int:
        return self._source.loaded_bytes

    def get(
        self, name: str, shape: tuple[int, ...], part: Part | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        assert part is None, "a rank's part cannot be split again"
        tensor = self._source.get(name, self._shapes.get(name, shape), self._parts.get(name), dtype)
        assert tuple(tensor.shape) == shape, f"{name}: this rank's part is {tuple(tensor.shape)}, not {shape}"
        return tensor

    def keep_as(self, handed_out: int, kept: int) -> None:
        self._source.keep_as(handed_out, kept)

    def leave(self, name: str) -> None:
        self._source.leave(name)

    def check_all_used(self, ignored: Sequence[str] = ()) -> None:
        for name, part in self._parts.items():
            if part == NOTHING:
                self._source.leave(name)
        self._source.check_all_used(ignored)


class RandomWeights:
    """Random normal weights with deviation 0.02; one-dimensional tensors except biases are 1.

    A tensor depends only on (seed, name). fp8 weights times their scales have the same deviation.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, seed: int = 0) -> None:
        self.device, self.dtype, self._seed = device, dtype, seed
        self.names: Collection[str] = ()
        self.loaded_bytes = 0

    def check_all_used(self, ignored: Sequence[str] = ()) -> None:
        """Do nothing: every name has a tensor."""

    def leave(self, name: str) -> None:
        """Do nothing: tensors are drawn on request."""

    def keep_as(self, handed_out: int, kept: int) -> None:
        self.loaded_bytes += kept - handed_out

    def get(
        self, name: str, shape: tuple[int, ...], part: Part | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        """Draw the whole tensor for any part, so that all ranks have one model."""
        whole = self._drawn(name, shape) if dtype is None else self._quantized(name, shape, dtype)
        tensor = whole if part is None else _taken(whole, part)
        self.loaded_bytes += tensor.nbytes
        return tensor

    def _drawn(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if len(shape) == 1 and not name.endswith(".bias"):
            return torch.ones(shape, device=self.device, dtype=self.dtype)
        return torch.randn(shape, generator=self._generator(name), device=self.device, dtype=self.dtype).mul_(0.02)

    def _generator(self, name: str) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(zlib.crc32(name.encode()) + self._seed)

    def _quantized(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if dtype == torch.uint8 and name.endswith(MXFP4_SCALES):
            return torch.full(shape, _RANDOM_E8M0, device=self.device, dtype=dtype)
        if name.endswith((GPTQ_ZEROS, INT4_ZEROS)):
            return torch.full(shape, _RANDOM_ZEROS, device=self.device, dtype=dtype)
        if not dtype.is_floating_point:
            bounds = torch.iinfo(dtype)
            numbers = torch.randint(
                bounds.min, bounds.max, shape, generator=self._generator(name), device=self.device, dtype=torch.int64
            )
            return numbers.to(dtype)
        if dtype != torch.float8_e4m3fn:
            return torch.full(shape, _RANDOM_SCALE, device=self.device, dtype=dtype)
        largest = torch.finfo(dtype).max
        return (self._drawn(name, shape).float() / _RANDOM_SCALE).clamp_(-largest, largest).to(dtype)


def _taken(tensor: Any, part: Part) -> Tensor:
    """Return a part of a tensor, or of a tensor in a file that is still unread."""
    before = (slice(None),) * part.dim
    pieces = [tensor[(*before, slice(*wanted))] for wanted in part.ranges]
    return pieces[0].contiguous() if len(pieces) == 1 else joined(pieces, part.dim)


def joined(pieces: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Concatenate pieces of any dtype; torch.cat() does not support fp8."""
    if pieces[0].dtype != torch.float8_e4m3fn:
        return torch.cat(list(pieces), dim)
    return torch.cat([piece.view(torch.uint8) for piece in pieces], dim).view(torch.float8_e4m3fn)
