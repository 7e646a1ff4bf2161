"""Sources of weights: safetensors files of a model directory, or random numbers of the right shape.

A source hands out each tensor once, on its device and in its dtype, and checks name and shape. It does not know what
the tensors mean.
"""

import math
import re
import zlib
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Protocol

import torch
from safetensors import safe_open
from torch import Tensor

from engine_worker.model.checkpoint import is_ignored, stored_tensors
from engine_worker.model.weight_upload import uploader

Report = Callable[[float, str], None]  # progress 0..1, detail


class WeightSource(Protocol):
    loaded_bytes: int  # of all tensors handed out
    device: torch.device  # on which they are
    names: Collection[str]  # of all there are; none where every name has a tensor

    def get(self, name: str, shape: tuple[int, ...]) -> Tensor: ...
    def check_all_used(self, ignored: Sequence[str] = ()) -> None:
        """`ignored`: patterns of names that may be left over."""


class SafetensorsWeights:
    def __init__(self, directory: Path, device: torch.device, dtype: torch.dtype, report: Report) -> None:
        self.device = device
        self._upload, self._dtype, self._report = uploader(device), dtype, report
        self._stored = stored_tensors(directory)
        self._files = {path: safe_open(path, framework="pt") for path in {t.path for t in self._stored.values()}}
        self.names: Collection[str] = frozenset(self._stored)
        self._unused = set(self._stored)
        self._total_bytes = sum(path.stat().st_size for path in self._files)
        self._read_bytes = 0
        self._reported_percent = 0
        self.loaded_bytes = 0

    def get(self, name: str, shape: tuple[int, ...]) -> Tensor:
        stored = self._stored.get(name)
        if stored is None:
            raise ValueError(f"the safetensors files have no {name}")
        tensor = self._files[stored.path].get_tensor(stored.name)
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; config.json makes it {shape}")
        self._unused.discard(name)
        self._read_bytes += tensor.nbytes
        self._report_progress()
        tensor = self._upload(tensor).to(self._dtype)
        self.loaded_bytes += tensor.nbytes
        return tensor

    def check_all_used(self, ignored: Sequence[str] = ()) -> None:
        """A tensor that nothing asked for (a bias, an adapter) would be left out silently."""
        unused = sorted(name for name in self._unused if not is_ignored(name))
        unused = [name for name in unused if not any(re.search(pattern, name) for pattern in ignored)]
        if unused:
            names = ", ".join(unused[:4])
            raise ValueError(f"the model has {len(unused)} weights that this network has no place for: {names}")

    def _report_progress(self) -> None:
        percent = self._read_bytes * 100 // self._total_bytes
        if percent >= self._reported_percent + 10:
            self._reported_percent = percent
            self._report(percent / 100, f"{self._read_bytes / 2**20:,.0f} of {self._total_bytes / 2**20:,.0f} MiB")


class RandomWeights:
    """Normal with deviation 0.02, norms (of one dimension, no biases) 1; a tensor depends on (seed, name) alone."""

    def __init__(self, device: torch.device, dtype: torch.dtype, seed: int = 0) -> None:
        self.device, self._dtype, self._seed = device, dtype, seed
        self.names: Collection[str] = ()
        self.loaded_bytes = 0

    def check_all_used(self, ignored: Sequence[str] = ()) -> None:
        """There is nothing that could be left over."""

    def get(self, name: str, shape: tuple[int, ...]) -> Tensor:
        self.loaded_bytes += math.prod(shape) * self._dtype.itemsize
        if len(shape) == 1 and not name.endswith(".bias"):
            return torch.ones(shape, device=self.device, dtype=self._dtype)
        generator = torch.Generator(self.device).manual_seed(zlib.crc32(name.encode()) + self._seed)
        return torch.randn(shape, generator=generator, device=self.device, dtype=self._dtype).mul_(0.02)
