"""Dequantize fp8 and 4-bit weights to 16 or 32 bits while they load: number * scale in float32, rounded once.

It serves devices without kernels for them, and is the reference of those kernels.
"""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from engine_worker.model.linear import Experts, ExpertsLoad, Head, Linear, LinearMethod, LinearSpec
from engine_worker.model.quantization.int4 import Int4Weight, read_int4
from engine_worker.model.specs.part import Part
from engine_worker.model.weight_format import (
    BLOCK,
    INPUT_SCALE,
    WEIGHT_SCALE,
    Fp8Scheme,
    Int4Scheme,
    ScalePer,
    WeightFormat,
)
from engine_worker.model.weights import WeightSource
from kernels.scaled import quantize_rows_reference

FP8 = torch.float8_e4m3fn


def dequantized(weight: Tensor, scale: Tensor, per: ScalePer) -> Tensor:
    """Return [N, K] float32 for an e4m3 weight [N, K] and a scale in the shape of Fp8Scheme.scale_shape()."""
    exact = weight.float()
    if per is ScalePer.BLOCK:
        rows, columns = weight.shape
        blocks = scale.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
        return exact.mul_(blocks)
    return exact.mul_(scale[:, None] if per is ScalePer.ROW else scale)


class DequantizedWeights:
    """The tensors of `source` with dequantized linear layers; online quantization is applied and undone."""

    def __init__(self, source: WeightSource, stored: WeightFormat) -> None:
        self._source, self._format = source, stored
        self.device, self.dtype = source.device, source.dtype
        self.names: Collection[str] = source.names

    @property
    def loaded_bytes(self) -> int:
        return self._source.loaded_bytes

    def get(
        self, name: str, shape: tuple[int, ...], part: Part | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        module = name.removesuffix(".weight")
        scheme = self._format.scheme_of(module) if len(shape) == 2 and module != name else None
        if not isinstance(scheme, Fp8Scheme | Int4Scheme) or dtype is not None:
            return self._source.get(name, shape, part, dtype)
        assert part is None, "wrap the source of parts; parts of dequantized weights are not supported"
        if isinstance(scheme, Int4Scheme):
            return self._kept(read_int4(self._source, module, shape, scheme))
        if self._format.is_online:
            rows = quantize_rows_reference(self._source.get(name, shape))
            return dequantized(rows.values, rows.scales, scheme.per).to(self.dtype)
        weight, scale, _ = read_fp8(self._source, module, shape, scheme)
        made = dequantized(weight, scale, scheme.per).to(self.dtype)
        self._source.keep_as(weight.nbytes + scale.nbytes, made.nbytes)
        return made

    def _kept(self, weight: Int4Weight) -> Tensor:
        made = weight.exact().to(self.dtype)
        self._source.keep_as(0, made.nbytes)
        return made

    def keep_as(self, handed_out: int, kept: int) -> None:
        self._source.keep_as(handed_out, kept)

    def leave(self, name: str) -> None:
        self._source.leave(name)

    def check_all_used(self, ignored: Sequence[str] = ()) -> None:
        self._source.check_all_used(ignored)


class DequantizedMethod:
    """Weights that are dequantized to 16 or 32 bits."""

    def __init__(self, stored: WeightFormat, multiplied: LinearMethod) -> None:
        self._format, self._dense = stored, multiplied

    def load(self, spec: LinearSpec, source: WeightSource) -> Linear:
        return self._dense.load(spec, DequantizedWeights(source, self._format))

    def experts(self, load: ExpertsLoad, source: WeightSource) -> Experts:
        return self._dense.experts(load, DequantizedWeights(source, self._format))

    def head(self, weight: Tensor, name: str, source: WeightSource) -> Head:
        return self._dense.head(weight, name, source)


def read_fp8(
    source: WeightSource, module: str, shape: tuple[int, ...], scheme: Fp8Scheme
) -> tuple[Tensor, Tensor, float | None]:
    """Return the e4m3 weight of `shape`, its scales, and the input scale if there is one."""
    rows, columns = shape
    scale = source.get(f"{module}.{WEIGHT_SCALE}", scheme.scale_shape(rows, columns), dtype=torch.float32)
    weight = source.get(f"{module}.weight", shape, dtype=FP8)
    if not scheme.has_input_scale:
        return weight, scale, None
    of_inputs = source.get(f"{module}.{INPUT_SCALE}", (), dtype=torch.float32)
    source.keep_as(of_inputs.nbytes, 0)  # kept as a Python number, not as a tensor
    return weight, scale, of_inputs.item()
