"""Products of 16 and 32 bits on a CPU, of which a row has the same bits whatever rows are beside it.

    bfloat16 that the processor multiplies   oneDNN in its own layout, once its rows were seen to be independent here
    bfloat16 and float32 else                C++ (kernels/cpu/dense.py), independent by construction
    the rest                                 torch: float16, and where there is no library

It is used at a worker's start, where weights load, and in every step. It knows no layer and no network.
"""

import logging
from functools import cache
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from engine_worker.model.linear import NOTHING_QUANTIZED, Input, Scaling
from engine_worker.model.spec import Activation
from kernels.cpu.build import NoLibrary
from kernels.cpu.dense import DenseLinear, gate_and_mul, serves
from kernels.cpu.library import CpuLibrary, cpu_library

logger = logging.getLogger("worker")

# Of products that are compared: libraries choose kernels by the number of rows, and these are where they change.
_ROWS = (1, 2, 3, 5, 8, 16, 17, 33, 64, 100, 150, 256)
_MOST_TRIED = 1 << 30  # products of numbers in a trial: 30 ms; of a large weight it is of fewer rows, 8 at least


class Product(Protocol):
    """x [T, inputs] -> [T, outputs] in `dtype`."""

    def __call__(self, x: Tensor, dtype: torch.dtype) -> Tensor: ...


class TorchProduct:
    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._weight, self._bias = weight, bias

    def __call__(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        if dtype == self._weight.dtype:
            return F.linear(x, self._weight, self._bias)
        return F.linear(x.to(dtype), self._weight.to(dtype))


class OneDnnProduct:
    """A bfloat16 weight in oneDNN's own layout, which halves the time: 1.1 for 2.7 ms of SmolLM2's head at T = 1."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None, least_rows: int = 1) -> None:
        """`least_rows`: fewer are repeated to that many."""
        self._weight, self._bias = torch.ops.mkldnn._reorder_linear_weight(weight), bias
        self._least_rows = least_rows

    def __call__(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        num_rows = len(x)
        if 0 < num_rows < self._least_rows:
            x = x.repeat(self._least_rows, 1)
        product: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, self._weight, self._bias, "none", [], "")
        if dtype != x.dtype:
            # oneDNN's product has the type of its inputs. A second one subtracts the first before it rounds, so both
            # together have 16 bits: as long as reading a float32 copy for one row, a third of it for 64.
            rest = torch.ops.mkldnn._linear_pointwise.binary(x, product, self._weight, None, "sub")
            product = product.float().add_(rest)
        return product[:num_rows]


def cpu_product(weight: Tensor, bias: Tensor | None = None) -> Product:
    library = _library()
    if weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported():
        least_rows = 1 if library is None else _least_rows(*weight.shape)
        if least_rows:
            return OneDnnProduct(weight, bias, least_rows)
        logger.info("oneDNN's product %s depends on the number of rows: C++ serves it", tuple(weight.shape))
    if library is not None and serves(weight):
        return DenseLinear(library, weight, bias)
    return TorchProduct(weight, bias)


class CpuLinear:
    scaling: Scaling = Scaling.NONE

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._product, self._library = cpu_product(weight, bias), _library()

    def __call__(self, x: Input) -> Tensor:
        assert isinstance(x, Tensor), NOTHING_QUANTIZED
        return self._product(x, x.dtype)

    def gated(self, x: Input, activation: Activation, scaling: Scaling = Scaling.NONE) -> Tensor:
        gate_up = self(x)
        if self._library is not None and serves(gate_up):
            return gate_and_mul(self._library, gate_up, is_gelu=activation is not Activation.SILU)
        gate, up = gate_up.chunk(2, dim=-1)
        return activated(gate, activation).mul_(up)


def activated(gate: Tensor, activation: Activation) -> Tensor:
    return F.silu(gate) if activation is Activation.SILU else F.gelu(gate, approximate="tanh")


class CpuHead:
    """Logits are float32: the sums as they were accumulated, whatever the dtype of the weights.

    Rounded to bfloat16, logits between 16 and 32 are multiples of 1/8, and the two likeliest tokens are often one value
    (ADR 0101).
    """

    def __init__(self, weight: Tensor) -> None:
        self._product = cpu_product(weight if weight.dtype == torch.bfloat16 else weight.float())

    def __call__(self, x: Tensor, logits: Tensor | None = None) -> Tensor:
        if isinstance(self._product, DenseLinear):
            return self._product(x, torch.float32, logits)
        computed = self._product(x, torch.float32)
        return computed if logits is None else logits.copy_(computed)


def rows_are_independent(product: Product, x: Tensor, result: torch.dtype) -> bool:
    """Whether the first rows of a product of x [T, inputs] have the same bits whatever rows follow, by trial."""
    together = product(x, result)
    return all(torch.equal(product(x[:rows], result), together[:rows]) for rows in _ROWS if rows < len(x))


@cache
def _least_rows(outputs: int, inputs: int) -> int:
    """The least number of rows from which on oneDNN's products of a shape are independent; 0: they are not."""
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(outputs, inputs, generator=generator).bfloat16()
    num_rows = max(9, min(_ROWS[-1] + 1, _MOST_TRIED // weight.numel()))
    x = torch.randn(num_rows, inputs, generator=generator).bfloat16()
    for least in (1, 2):
        product = OneDnnProduct(weight, None, least)
        if all(rows_are_independent(product, x, result) for result in (torch.bfloat16, torch.float32)):
            return least
    return 0


@cache
def _library() -> CpuLibrary | None:
    try:
        return cpu_library()
    except NoLibrary as error:
        logger.info("products by torch: %s", error)
        return None
