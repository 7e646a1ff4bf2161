"""A GGUF file's 4-bit blocks on Hopper GPUs (kernels/w4a16).

A layer with a part in 8 or more bits, experts and the head are read from the dequantized weights, in 16 bits.
"""

import torch
from torch import Tensor

from engine_worker.model.grouped_bytes import why_not_on_gpu
from engine_worker.model.linear import Experts, ExpertsLoad, Head, Linear, LinearMethod, LinearSpec
from engine_worker.model.quantization import dense
from engine_worker.model.quantization.int4_cuda import W4Linear, log_16_bits, why_no_kernels
from engine_worker.model.quantization.rows import rows_of
from engine_worker.model.specs.part import Role
from engine_worker.model.stored_blocks import StoredBlocks
from engine_worker.model.weight_format import WeightFormat
from engine_worker.model.weights import WeightSource
from kernels.cpu.linear import joined_rows
from kernels.w4a16.weights import W4Weight, pack_w4


def method(stored: WeightFormat, is_deterministic: bool) -> LinearMethod:
    assert stored.blocks is not None
    return BlocksMethod(StoredBlocks(stored.blocks), dense.method("cuda", is_deterministic), is_deterministic)


class BlocksMethod:
    """Linear layers whose parts all have blocks of 4 bits; others are those of `in_16_bits`."""

    def __init__(self, blocks: StoredBlocks, in_16_bits: LinearMethod, is_deterministic: bool) -> None:
        self._blocks, self._in_16_bits, self._is_deterministic = blocks, in_16_bits, is_deterministic

    def load(self, spec: LinearSpec, source: WeightSource) -> Linear:
        names = [f"{name}.weight" for name in spec.names]
        types = {self._blocks.type_of(name) for name in names}
        why = why_no_kernels(source) or why_not_on_gpu(types, sum(spec.sizes), spec.inputs)
        if why:
            log_16_bits(spec.role, why)
            return self._in_16_bits.load(spec, source)
        packed = packed_blocks(spec, self._blocks, source.device)
        for name in names:
            source.leave(name)
        source.keep_as(0, packed.nbytes)
        bias = rows_of(spec, source, "bias", ()) if spec.bias else None
        return W4Linear(packed, bias, is_deterministic=self._is_deterministic)

    def experts(self, load: ExpertsLoad, source: WeightSource) -> Experts:
        return self._in_16_bits.experts(load, source)

    def head(self, weight: Tensor, name: str, source: WeightSource) -> Head:
        return self._in_16_bits.head(weight, name, source)


def packed_blocks(spec: LinearSpec, blocks: StoredBlocks, device: torch.device) -> W4Weight:
    """Return the weight of a layer whose parts all have 4 bits."""
    sizes = zip(spec.names, spec.sizes, strict=True)
    parts = [blocks.get(f"{name}.weight", (size, spec.inputs)) for name, size in sizes]
    weight = joined_rows([part for part in parts if part is not None])
    weight = weight if spec.row_order is None else weight.rows(spec.row_order)
    quants, scales = weight.quants.to(device), weight.scales.to(device)
    values = torch.cat((quants & 15, quants >> 4), -1).flatten(1)
    minima = None if weight.minima is None else weight.minima.to(device)
    return pack_w4(values, scales, minima=minima, is_gated=spec.role is Role.GATE_UP)
