"""Unquantized linear layers on CUDA: skinny_linear where its rule has tiles for the shape, else the library."""

import logging
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from engine_worker.model.linear import NOTHING_QUANTIZED, Input
from engine_worker.model.specs.mlp import GateKind, GateSpec
from kernels.scaled import Scaling
from kernels.silu_and_mul import gelu_tanh_and_mul, silu_and_mul
from kernels.skinny_linear import gated_skinny_linear, skinny_linear
from kernels.skinny_linear_tiles import max_rows, tiles_for

logger = logging.getLogger("worker")

# With so few rows cuBLAS may choose a kernel that adds in another order. On an H200 these are one row in bfloat16,
# up to 16 in float32, and up to 32 in float16 if the number of outputs is odd.
_FEW_ROWS = 32


def _library_linear(x: Tensor, weight: Tensor, bias: Tensor | None, is_deterministic: bool) -> Tensor:
    """Return F.linear(); `is_deterministic`: the bits of a row are those in a batch of more than _FEW_ROWS rows."""
    if not is_deterministic or len(x) > _FEW_ROWS:
        return F.linear(x, weight, bias)
    return F.linear(_padded(x), weight, bias)[: len(x)]


def _padded(x: Tensor) -> Tensor:
    return F.pad(x, (0, 0, 0, 2 * _FEW_ROWS - len(x)))


def log_kernel(name: str, weight: Tensor, is_gated: bool) -> None:
    """Log the kernel for layers of this name and shape, once."""
    _log(name, *weight.shape, max_rows(weight, is_gated))


@cache
def _log(name: str, num_outputs: int, num_inputs: int, num_rows: int) -> None:
    served = f"skinny_linear up to {num_rows} rows" if num_rows else "library kernel"
    logger.info("%s, %d x %d: %s", name, num_outputs, num_inputs, served)


class CudaLinear:
    scaling: Scaling = Scaling.NONE

    def __init__(self, weight: Tensor, bias: Tensor | None = None, is_deterministic: bool = False) -> None:
        self.weight, self.bias, self._is_deterministic = weight, bias, is_deterministic

    def __call__(self, x: Input) -> Tensor:
        assert isinstance(x, Tensor), NOTHING_QUANTIZED
        tiles = tiles_for(self.weight, len(x), is_gated=False)
        if tiles is None:
            return _library_linear(x, self.weight, self.bias, self._is_deterministic)
        return skinny_linear(x, self.weight, tiles, bias=self.bias)

    def gated(self, x: Input, gate: GateSpec, scaling: Scaling = Scaling.NONE) -> Tensor:
        assert isinstance(x, Tensor), NOTHING_QUANTIZED
        if gate.kind is GateKind.GELU_TANH:
            return gelu_tanh_and_mul(self(x))
        tiles = tiles_for(self.weight, len(x), is_gated=True)
        if tiles is None:
            return silu_and_mul(_library_linear(x, self.weight, self.bias, self._is_deterministic))
        return gated_skinny_linear(x, self.weight, tiles, self.bias)


class CudaHead:
    """The output head: logits are float32, as on a CPU (dense_cpu.py)."""

    def __init__(self, weight: Tensor, is_deterministic: bool = False) -> None:
        self.weight, self._is_deterministic = weight, is_deterministic

    def __call__(self, x: Tensor, logits: Tensor | None = None) -> Tensor:
        if logits is None:
            logits = x.new_empty(len(x), len(self.weight), dtype=torch.float32)
        tiles = tiles_for(self.weight, len(x), is_gated=False)
        if tiles is not None:
            return skinny_linear(x, self.weight, tiles, logits)
        if self._is_deterministic and len(x) <= _FEW_ROWS:
            return logits.copy_(self(_padded(x))[: len(x)])
        if x.dtype == torch.float32:
            return torch.mm(x, self.weight.T, out=logits)
        return torch.mm(x, self.weight.T, out_dtype=torch.float32, out=logits)
