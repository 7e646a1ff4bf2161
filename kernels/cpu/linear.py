"""Linear layers with 8-bit and 4-bit weights in groups of 32 inputs, in C++ (csrc/linear.h has the arithmetic).

GroupedWeight holds numbers and scales as stored, PackedLinear the same in the order of the instructions. Each kernel is
compared with plain loops once before use.
"""

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.cpu.build import NoLibrary
from kernels.cpu.library import InstructionSet, address, cpu_library, num_threads

GROUP = 32  # inputs per scale
_OUTPUTS = 16  # per block
_INT8_MAX = 127
_TYPES = {torch.float32: 0, torch.bfloat16: 1}  # values of csrc/linear_weight.h
_FUNCTIONS = {InstructionSet.AVX2: "pagestream_linear_avx2", InstructionSet.AVX512_VNNI: "pagestream_linear_avx512"}
_PLAIN = "pagestream_linear_plain"
_NO_MEMORY = 1
_TRIED_ROWS = (5, 13, 19, 23)  # cover tiles of 4 and 1 rows, and AVX-512 panels of 6 to 12 rows
_QUANTIZED_AT_ONCE = 2**14  # numbers: they fit a cache, and operators on so few wake no threads
_ROUNDED_AT_ONCE = 2**22  # numbers in float32
_ROUNDING = 1.5 * 2**23  # adding it rounds a float32; round() would wake threads from 2,048 numbers on

Kernel = Any  # a function of the library


class GroupFormat(IntEnum):
    """What a stored number means; the values are those of csrc/linear_weight.h."""

    INT8 = 0  # scale * quant
    INT4_ZERO_8 = 1  # scale * (quant - 8)
    INT4_MINIMUM = 2  # scale * quant + minimum
    E2M1 = 3  # scale / 2 * E2M1_NUMBERS[quant]


# Twice the values of a sign, two bits of exponent and one of fraction, as in MXFP4.
E2M1_NUMBERS = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


class Gate(IntEnum):
    """Gate activations; the values are those of csrc/linear_weight.h."""

    SILU = 1
    GELU_TANH = 2
    LIMITED_SILU = 3  # gate * sigmoid(alpha * gate) * (up + up_offset), gate at most `limit` and up within it


class GateLimits(NamedTuple):
    """The numbers of LIMITED_SILU."""

    alpha: float = 1.0
    limit: float = math.inf
    up_offset: float = 0.0


NO_LIMITS = GateLimits()


@dataclass(frozen=True)
class GroupedWeight:
    """A weight [N, K] in groups of 32 inputs. If K is not a multiple of 32, the last group is padded with zeros."""

    format: GroupFormat
    quants: Tensor  # [N, groups, 32] int8 for INT8, else [N, groups, 16] uint8: low nibbles are numbers 0-15
    scales: Tensor  # [N, groups] float16; E2M1: uint8, the exponent of a power of two plus 127 (e8m0)
    minima: Tensor | None = None  # [N, groups] float16, only for INT4_MINIMUM

    def __len__(self) -> int:
        return len(self.quants)

    def rows(self, order: Tensor | slice) -> "GroupedWeight":
        """Return the selected rows."""
        minima = None if self.minima is None else self.minima[order]
        return GroupedWeight(self.format, self.quants[order], self.scales[order], minima)

    def values(self) -> Tensor:
        """Return the exact values, [N, groups * 32], float32."""
        is_e2m1 = self.format is GroupFormat.E2M1
        scales = (torch.exp2(self.scales.float() - 128) if is_e2m1 else self.scales.float())[..., None]
        is_int8 = self.format is GroupFormat.INT8
        quants = (self.quants if is_int8 else torch.cat((self.quants & 15, self.quants >> 4), -1)).float()
        if is_e2m1:
            quants = torch.tensor(E2M1_NUMBERS, dtype=torch.float32)[quants.int()]
        if self.format is GroupFormat.INT4_ZERO_8:
            quants -= 8
        exact = quants * scales
        return (exact if self.minima is None else exact + self.minima.float()[..., None]).flatten(1)


def joined_rows(parts: Sequence[GroupedWeight]) -> GroupedWeight:
    """Concatenate weights along the output dimension.

    Of several formats, INT4_MINIMUM holds 4-bit integers exactly. Beside 8 bits or E2M1, the others are rounded to 8
    bits, by at most a 254th of a group's largest number.

    Raises:
        ValueError: If a scale does not fit float16.
    """
    formats = {part.format for part in parts}
    needs_8_bits = len(formats) > 1 and bool(formats & {GroupFormat.INT8, GroupFormat.E2M1})
    common = GroupFormat.INT8 if needs_8_bits else max(formats)
    parts = [_in_format(part, common) for part in parts]
    minima = [part.minima for part in parts if part.minima is not None]
    return GroupedWeight(
        common,
        torch.cat([part.quants for part in parts]),
        torch.cat([part.scales for part in parts]),
        torch.cat(minima) if minima else None,
    )


def _in_format(weight: GroupedWeight, format_: GroupFormat) -> GroupedWeight:
    if weight.format is format_:
        return weight
    if format_ is GroupFormat.INT8:
        return quantized(weight.values())
    minima = weight.scales * -8.0
    if not minima.isfinite().all():
        raise ValueError("cannot join 4-bit weights: eight times a scale does not fit float16")
    return GroupedWeight(format_, weight.quants, weight.scales, minima)


def quantized(weight: Tensor) -> GroupedWeight:
    """Quantize a weight [N, K] to INT8, with the largest number of each group at 127.

    Numbers are rounded against the stored float16 scale, unlike ggml's quantize_row_q8_0_ref().

    Raises:
        ValueError: If a scale does not fit float16.
    """
    num_groups = -(-weight.shape[1] // GROUP)
    quants = torch.empty((len(weight), num_groups, GROUP), dtype=torch.int8)
    scales = torch.empty((len(weight), num_groups), dtype=torch.float16)
    rows = max(1, _QUANTIZED_AT_ONCE // max(1, weight.shape[1]))
    for part, of_quants, of_scales in zip(weight.split(rows), quants.split(rows), scales.split(rows), strict=True):
        _quantize(part, of_quants, of_scales)
    if not scales.isfinite().all():
        raise ValueError("cannot quantize to 8 bits: a weight is NaN, infinite or too large for a float16 scale")
    return GroupedWeight(GroupFormat.INT8, quants, scales)


def _quantize(weight: Tensor, quants: Tensor, scales: Tensor) -> None:
    groups = F.pad(weight.float(), (0, quants.shape[1] * GROUP - weight.shape[1])).unflatten(1, (-1, GROUP))
    scales.copy_(groups.abs().amax(2) / _INT8_MAX)
    exact = scales.float()[..., None]
    # If a scale underflows to 0, the numbers are below a millionth; dividing by 1 instead rounds them to 0.
    quants.copy_(
        (groups / exact.masked_fill_(exact == 0, 1)).add_(_ROUNDING).sub_(_ROUNDING).clamp_(-_INT8_MAX, _INT8_MAX)
    )


def quantized_to_4_bits(weight: Tensor) -> GroupedWeight:
    """Quantize a weight [N, K] to INT4_MINIMUM with a small squared error; kernels/w4a16/rounding.py describes how.

    Raises:
        ValueError: If a scale or minimum does not fit float16.
        NoLibrary: If there is no library.
    """
    rows, columns = weight.shape
    num_groups = -(-columns // GROUP)
    quants = torch.empty((rows, num_groups, GROUP // 2), dtype=torch.uint8)
    scales, minima = (torch.empty((rows, num_groups), dtype=torch.float16) for _ in range(2))
    at_once = max(1, _ROUNDED_AT_ONCE // max(1, columns))
    for first in range(0, rows, at_once):
        part = weight[first : first + at_once].float().contiguous()
        outputs = (address(each[first:]) for each in (quants, scales, minima))
        _rounding_kernel()(part.data_ptr(), len(part), columns, *outputs, num_threads())
    if not scales.isfinite().all():
        raise ValueError("cannot quantize to 4 bits: a weight is NaN, infinite or too large for a float16 scale")
    return GroupedWeight(GroupFormat.INT4_MINIMUM, quants, scales, minima)


@cache
def _rounding_kernel() -> Kernel:
    function = cpu_library().functions.pagestream_round_to_4_bits
    function.argtypes = [ctypes.c_void_p, *[ctypes.c_int64] * 2, *[ctypes.c_void_p] * 3, ctypes.c_int]
    function.restype = None
    return function


class LinearWeight(ctypes.Structure):
    """Mirrors LinearWeight of csrc/linear_weight.h."""

    _fields_ = (
        ("quants", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("minima", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("outputs", ctypes.c_int64),
        ("inputs", ctypes.c_int64),
        ("format", ctypes.c_int32),
        ("gate", ctypes.c_int32),
        *((name, ctypes.c_float) for name in GateLimits._fields),
    )


class PackedLinear:
    """A weight in kernel order; maps x [T, inputs] to [T, outputs].

    A gated weight computes activation(x @ gate) * (x @ up), [T, outputs / 2]. A row's result depends only on the row. A
    row with NaN or infinity gives NaN.
    """

    def __init__(
        self,
        weight: GroupedWeight,
        inputs: int,
        bias: Tensor | None = None,
        *,
        is_gated: bool = False,
        kernel: Kernel = None,
    ) -> None:
        """Pack the weight.

        Args:
            weight: The stored weight; gated: the rows of gate, then those of up.
            inputs: Number of inputs without padding.
            bias: [outputs], or None.
            is_gated: Apply the gate to the two halves of the outputs.
            kernel: One of linear_kernels(); default: the fastest.

        Raises:
            NoLibrary: If there is no library.
        """
        self._kernel = kernel or fastest_kernel()
        self.outputs, self._width = len(weight), len(weight) // 2 if is_gated else len(weight)
        self.inputs, self._is_gated = inputs, is_gated
        self._tensors = _packed(weight, is_gated)  # must stay alive: the structure holds their addresses
        self._bias = None if bias is None else bias.float().contiguous()
        quants, scales, minima = self._tensors
        self._weight = LinearWeight(
            address(quants), address(scales), address(minima), address(self._bias),
            len(weight), inputs, weight.format, 0, *NO_LIMITS,
        )  # fmt: skip
        self._address = ctypes.addressof(self._weight)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors if tensor is not None)

    @property
    def format(self) -> GroupFormat:
        return GroupFormat(self._weight.format)

    def structure(self, gate: Gate = Gate.SILU, limits: GateLimits = NO_LIMITS) -> LinearWeight:
        """Return what kernels read; this object must stay alive. `gate` is the activation of a gated weight."""
        copy = LinearWeight.from_buffer_copy(self._weight)
        copy.gate, copy.alpha, copy.limit, copy.up_offset = gate if self._is_gated else 0, *limits
        return copy

    def __call__(
        self,
        x: Tensor,
        out: Tensor | None = None,
        gate: Gate = Gate.SILU,
        threads: int | None = None,
        limits: GateLimits = NO_LIMITS,
    ) -> Tensor:
        """Multiply x.

        Args:
            x: [T, inputs], float32 or bfloat16.
            out: [T, width], float32 or bfloat16; default: a new tensor in the dtype of x.
            gate: Activation of a gated weight.
            threads: Default: as many as torch's operators use.
            limits: Of LIMITED_SILU.

        Returns:
            `out`.

        Raises:
            MemoryError: If the kernel cannot allocate its scratch memory.
        """
        if x.stride(1) != 1:
            x = x.contiguous()
        rows, inputs = x.shape
        if out is None:
            out = torch.empty((rows, self._width), dtype=x.dtype)
        assert inputs == self.inputs and out.shape == (rows, self._width) and out.stride(1) == 1
        weight = self._weight
        weight.gate, weight.alpha, weight.limit, weight.up_offset = gate if self._is_gated else 0, *limits
        status = self._kernel(
            self._address, x.data_ptr(), x.stride(0), _TYPES[x.dtype], rows, out.data_ptr(), out.stride(0),
            _TYPES[out.dtype], threads or num_threads(),
        )  # fmt: skip
        if status == _NO_MEMORY:
            raise MemoryError(f"out of memory for {rows} rows of {self.inputs} inputs")
        return out


def _packed(weight: GroupedWeight, is_gated: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return quants, scales and minima in blocks of 16 outputs; gated: a block of gate, then one of up."""
    minima = None if weight.minima is None else _in_blocks(weight.minima, is_gated).transpose(1, 2).contiguous()
    scales = _in_blocks(weight.scales, is_gated).transpose(1, 2).contiguous()
    fours = weight.quants.contiguous().view(torch.int32)  # moving single bytes took 10 s for 135 M weights
    lines = _in_blocks(fours, is_gated).permute(0, 2, 3, 1)  # [B, groups, 8 or 4, 16]
    return lines.contiguous(), scales, minima


def _in_blocks(rows: Tensor, is_gated: bool) -> Tensor:
    """Reshape [N, ...] to [blocks, 16, ...]; missing outputs of the last block are zero."""
    parts = [_whole_blocks(part).unflatten(0, (-1, _OUTPUTS)) for part in rows.chunk(2 if is_gated else 1)]
    return torch.stack(parts, 1).flatten(0, 1) if is_gated else parts[0]


def _whole_blocks(rows: Tensor) -> Tensor:
    missing = -len(rows) % _OUTPUTS
    return torch.cat((rows, rows.new_zeros(missing, *rows.shape[1:]))) if missing else rows


@cache
def plain_kernel() -> Kernel:
    """Return the plain loops, which are hundreds of times slower than the instruction sets.

    Raises:
        NoLibrary: If there is no library.
    """
    return _function(_PLAIN)


@cache
def linear_kernels() -> dict[InstructionSet, Kernel]:
    """Return the kernel of each instruction set of this processor.

    Raises:
        NoLibrary: If there is no library, or a kernel differs from plain loops.
    """
    kernels = {one: _function(_FUNCTIONS[one]) for one in cpu_library().instruction_sets}
    for one, kernel in kernels.items():
        if not is_right(kernel):
            raise NoLibrary(f"self-test failed: {_FUNCTIONS[one]} differs from plain loops on this processor")
    return kernels


def fastest_kernel() -> Kernel:
    """Return the kernel of the fastest instruction set.

    Raises:
        NoLibrary: If there is no library.
    """
    return linear_kernels()[cpu_library().instruction_set]


def is_right(kernel: Kernel) -> bool:
    """Return whether small layers of every format have the same bits as plain loops."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn((max(_TRIED_ROWS), 70), generator=generator)
    for format_ in GroupFormat:
        is_int8 = format_ is GroupFormat.INT8
        numbers, dtype, width = ((-127, 128), torch.int8, GROUP) if is_int8 else ((0, 256), torch.uint8, GROUP // 2)
        weight = GroupedWeight(
            format_,
            torch.randint(*numbers, (36, 3, width), generator=generator).to(dtype),
            _random_scales(format_, (36, 3), generator),
            -torch.rand((36, 3), generator=generator).half() if format_ is GroupFormat.INT4_MINIMUM else None,
        )
        limits = GateLimits(1.7, 0.5, 1.0)
        for is_gated, gate in ((False, Gate.SILU), *((True, gate) for gate in Gate)):
            found, wanted = (
                PackedLinear(weight, 70, is_gated=is_gated, kernel=one) for one in (kernel, plain_kernel())
            )
            exact = wanted(x, gate=gate, limits=limits)
            # One thread: waking others takes ten times as long as these layers.
            if not all(
                torch.equal(found(x[:rows], gate=gate, threads=1, limits=limits), exact[:rows]) for rows in _TRIED_ROWS
            ):
                return False
    return True


def _random_scales(format_: GroupFormat, shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    if format_ is GroupFormat.E2M1:
        return torch.randint(120, 130, shape, generator=generator).to(torch.uint8)
    return torch.rand(shape, generator=generator).half()


def _function(name: str) -> Kernel:
    function = getattr(cpu_library().functions, name)
    function.argtypes = [
        ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_int64,
        ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_int,
    ]  # fmt: skip
    function.restype = ctypes.c_int
    return function
