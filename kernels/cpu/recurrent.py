"""C++ kernels of layers with a recurrent state (csrc/recurrent.h): recurrent/reference.py has them in torch."""

from ctypes import POINTER, Structure, byref, c_float, c_int, c_int32, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor

from kernels.cpu.library import CpuLibrary, InstructionSet, num_threads
from kernels.cpu.step import DTYPES, SUFFIXES
from kernels.recurrent.batch import DeltaRates, GatedDeltaHeads, RecurrentBatch

MAX_KEY_DIM = 512  # csrc/recurrent.h


class _Sequences(Structure):
    _fields_ = (
        ("starts", c_void_p),
        ("blocks", c_void_p),
        ("states", c_void_p),
        ("stride", c_int64),
        ("count", c_int64),
        ("num_threads", c_int32),
    )


class _Heads(Structure):
    _fields_ = tuple((name, c_int32) for name in ("num_key_heads", "num_heads", "key_dim", "value_dim"))


_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "causal_conv": (POINTER(_Sequences), c_void_p, c_int64, c_void_p, c_int64, c_int64, c_void_p, c_int),
    "gated_delta": (
        POINTER(_Sequences), POINTER(_Heads), c_void_p, c_int64, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p,
        c_int,
    ),
    "gated_rms_norm": (
        c_void_p, c_void_p, c_int64, c_void_p, c_float, c_int64, c_int64, c_int64, c_void_p, c_int, c_int,
    ),
    "multiply_sigmoid": (c_void_p, c_void_p, c_int64, c_int64, c_int64, c_int, c_int),
}  # fmt: skip


class CompiledRecurrent:
    """RecurrentOperators in C++, for one dtype of the activations."""

    _causal_conv: Any
    _gated_delta: Any
    _gated_rms_norm: Any
    _multiply_sigmoid: Any

    def __init__(self, library: CpuLibrary, dtype: torch.dtype, instruction_set: InstructionSet | None = None) -> None:
        """Select the kernels; default: those of the fastest instruction set."""
        self._dtype, self._type = dtype, DTYPES[dtype]
        suffix = SUFFIXES[instruction_set or library.instruction_set]
        for name, arguments in _ARGUMENTS.items():
            function = getattr(library.functions, f"pagestream_{name}_{suffix}")
            function.argtypes, function.restype = list(arguments), None
            setattr(self, f"_{name}", function)

    def causal_conv(self, x: Tensor, weight: Tensor, states: Tensor, batch: RecurrentBatch) -> Tensor:
        (width, channels), out = weight.shape, torch.empty(len(x), weight.shape[1], dtype=self._dtype)
        assert x.stride(1) == 1 and x.dtype == self._dtype and weight.is_contiguous() and weight.dtype == torch.float32
        assert states.stride()[1:] == (channels, 1)
        self._causal_conv(
            byref(_sequences(states, batch)), x.data_ptr(), x.stride(0), weight.data_ptr(), channels, width,
            out.data_ptr(), self._type,
        )  # fmt: skip
        return out

    def gated_delta(
        self,
        qkv: Tensor,
        gates: Tensor,
        rates: DeltaRates,
        states: Tensor,
        heads: GatedDeltaHeads,
        batch: RecurrentBatch,
    ) -> Tensor:
        assert qkv.stride(1) == 1 and qkv.dtype == self._dtype and heads.key_dim <= MAX_KEY_DIM
        assert gates.is_contiguous() and gates.dtype == self._dtype and states[0].is_contiguous()
        out = torch.empty(len(qkv), heads.value_size, dtype=self._dtype)
        is_synthetic = not batch.state_blocks.all()
        scratch = torch.empty(len(batch.state_blocks) * heads.state_size if is_synthetic else 0)
        of_layer = _Heads(heads.num_key_heads, heads.num_heads, heads.key_dim, heads.value_dim)
        self._gated_delta(
            byref(_sequences(states, batch)), byref(of_layer), qkv.data_ptr(), qkv.stride(0), gates.data_ptr(),
            rates.decay.data_ptr(), rates.step_bias.data_ptr(), scratch.data_ptr(), out.data_ptr(), self._type,
        )  # fmt: skip
        return out

    def gated_rms_norm(self, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        assert x.is_contiguous() and gate.stride(1) == 1 and x.dtype == gate.dtype == self._dtype
        assert weight.dtype == torch.float32
        out, size = torch.empty_like(x), len(weight)
        self._gated_rms_norm(
            x.data_ptr(), gate.data_ptr(), gate.stride(0), weight.data_ptr(), eps, len(x), x.shape[1] // size, size,
            out.data_ptr(), num_threads(), self._type,
        )  # fmt: skip
        return out

    def multiply_sigmoid(self, x: Tensor, gate: Tensor) -> Tensor:
        assert x.is_contiguous() and gate.stride(1) == 1 and x.dtype == gate.dtype == self._dtype
        self._multiply_sigmoid(
            x.data_ptr(), gate.data_ptr(), gate.stride(0), *x.shape, num_threads(), self._type
        )  # fmt: skip
        return x


def _sequences(states: Tensor, batch: RecurrentBatch) -> _Sequences:
    assert states.dtype == torch.float32
    return _Sequences(
        batch.query_start_loc.data_ptr(), batch.state_blocks.data_ptr(), states.data_ptr(), states.stride(0),
        len(batch.state_blocks), num_threads(),
    )  # fmt: skip
