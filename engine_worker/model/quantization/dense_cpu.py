"""Unquantized linear layers on a CPU, with the same bits for a row in any batch.

bfloat16 uses oneDNN if the processor supports it and the self-test shows that rows are independent. Other bfloat16 and
float32 weights use C++ (kernels/cpu/dense.py), which is independent by construction. float16, and everything without
the C++ library, uses torch.
"""

import logging
from functools import cache
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from engine_worker.model.linear import NOTHING_QUANTIZED, Input
from engine_worker.model.specs.mlp import GateKind, GateSpec
from kernels.cpu.build import NoLibrary
from kernels.cpu.dense import DenseLinear, gate_and_mul, serves
from kernels.cpu.library import CpuLibrary, cpu_library
from kernels.scaled import Scaling

logger = logging.getLogger("worker")

# Numbers of rows compared in the self-test: libraries switch kernels at these.
_ROWS = (1, 2, 3, 5, 8, 16, 17, 33, 64, 100, 150, 256)
_MAX_TRIED = 1 << 30  # multiplications per self-test, 30 ms; large weights are tried with fewer rows, at least 8


class Kernel(Protocol):
    """Maps x [T, inputs] to [T, outputs] in `dtype`."""

    def __call__(self, x: Tensor, dtype: torch.dtype) -> Tensor: ...


class TorchLinear:
    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._weight, self._bias = weight, bias

    def __call__(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        if dtype == self._weight.dtype:
            return F.linear(x, self._weight, self._bias)
        return F.linear(x.to(dtype), self._weight.to(dtype))


class OneDnnLinear:
    """A bfloat16 weight in oneDNN's layout, which takes half the time: 1.1 ms for SmolLM2's head at T = 1, not 2.7."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None, min_rows: int = 1) -> None:
        """Reorder the weight; with fewer than `min_rows` rows, the input is repeated."""
        self._weight, self._bias = torch.ops.mkldnn._reorder_linear_weight(weight), bias
        self._min_rows = min_rows

    def __call__(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        num_rows = len(x)
        if 0 < num_rows < self._min_rows:
            x = x.repeat(self._min_rows, 1)
        product: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, self._weight, self._bias, "none", [], "")
        if dtype != x.dtype:
            # oneDNN's result has the input's dtype. A second product subtracts the first before rounding, so the pair
            # has 16 bits. It takes as long as reading a float32 copy for one row, and a third of that for 64 rows.
            rest = torch.ops.mkldnn._linear_pointwise.binary(x, product, self._weight, None, "sub")
            product = product.float().add_(rest)
        return product[:num_rows]


def cpu_kernel(weight: Tensor, bias: Tensor | None = None) -> Kernel:
    library = _library()
    if weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported():
        min_rows = 1 if library is None else _independent_from(*weight.shape)
        if min_rows:
            return OneDnnLinear(weight, bias, min_rows)
        logger.info("linear layers: %s: using C++: oneDNN's result depends on the number of rows", tuple(weight.shape))
    if library is not None and serves(weight):
        return DenseLinear(library, weight, bias)
    return TorchLinear(weight, bias)


class CpuLinear:
    scaling: Scaling = Scaling.NONE

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._kernel, self._library = cpu_kernel(weight, bias), _library()

    def __call__(self, x: Input) -> Tensor:
        assert isinstance(x, Tensor), NOTHING_QUANTIZED
        return self._kernel(x, x.dtype)

    def gated(self, x: Input, gate: GateSpec, scaling: Scaling = Scaling.NONE) -> Tensor:
        gate_up = self(x)
        if not gate.is_plain:
            return combined(gate_up, gate)
        if self._library is not None and serves(gate_up):
            return gate_and_mul(self._library, gate_up, is_gelu=gate.kind is GateKind.GELU_TANH)
        gates, ups = gate_up.chunk(2, dim=-1)
        return activated(gates, gate.kind).mul_(ups)


def combined(gate_up: Tensor, gate: GateSpec) -> Tensor:
    """Combine gate and up, the halves of gate_up [T, 2 I], as GateSpec states; in float32, in the dtype of gate_up."""
    gates, ups = gate_up.float().chunk(2, dim=-1)
    if gate.limit:
        gates, ups = gates.clamp(max=gate.limit), ups.clamp(-gate.limit, gate.limit)
    is_silu = gate.kind is GateKind.SILU
    activated = gates * torch.sigmoid(gate.alpha * gates) if is_silu else F.gelu(gates, approximate="tanh")
    return (activated * (ups + gate.up_offset)).to(gate_up.dtype)


def activated(gate: Tensor, kind: GateKind) -> Tensor:
    return F.silu(gate) if kind is GateKind.SILU else F.gelu(gate, approximate="tanh")


class CpuHead:
    """The output head: logits are the float32 sums, whatever the dtype of the weights.

    In bfloat16, logits between 16 and 32 would be multiples of 1/8, and the two most likely tokens often equal (ADR
    0101).
    """

    def __init__(self, weight: Tensor) -> None:
        self._kernel = cpu_kernel(weight if weight.dtype == torch.bfloat16 else weight.float())

    def __call__(self, x: Tensor, logits: Tensor | None = None) -> Tensor:
        if isinstance(self._kernel, DenseLinear):
            return self._kernel(x, torch.float32, logits)
        computed = self._kernel(x, torch.float32)
        return computed if logits is None else logits.copy_(computed)


def rows_are_independent(kernel: Kernel, x: Tensor, result: torch.dtype) -> bool:
    """Return whether the first rows of x [T, inputs] have the same bits whatever rows follow, by trial."""
    together = kernel(x, result)
    return all(torch.equal(kernel(x[:rows], result), together[:rows]) for rows in _ROWS if rows < len(x))


@cache
def _independent_from(outputs: int, inputs: int) -> int:
    """Return the number of rows from which on oneDNN's rows are independent for this shape; 0: never."""
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(outputs, inputs, generator=generator).bfloat16()
    num_rows = max(9, min(_ROWS[-1] + 1, _MAX_TRIED // weight.numel()))
    x = torch.randn(num_rows, inputs, generator=generator).bfloat16()
    for min_rows in (1, 2):
        kernel = OneDnnLinear(weight, None, min_rows)
        if all(rows_are_independent(kernel, x, result) for result in (torch.bfloat16, torch.float32)):
            return min_rows
    return 0


@cache
def _library() -> CpuLibrary | None:
    try:
        return cpu_library()
    except NoLibrary as error:
        logger.info("linear layers: using torch: %s", error)
        return None
