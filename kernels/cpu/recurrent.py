"""C++ kernels of layers with a recurrent state (csrc/recurrent.h): recurrent/reference.py has them in torch."""

from ctypes import POINTER, Structure, byref, c_float, c_int, c_int32, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor

from kernels.cpu.library import CpuLibrary, InstructionSet, num_threads
from kernels.cpu.step import DTYPES, SUFFIXES
from kernels.recurrent.batch import DraftedStates, PendingInputs, RecurrentBatch, StateHeads, StateRates
from kernels.recurrent.reference import TorchRecurrent
from kernels.scaled import Scaling


class _Sequences(Structure):
    _fields_ = (
        ("starts", c_void_p),
        ("blocks", c_void_p),
        ("states", c_void_p),
        ("stride", c_int64),
        ("count", c_int64),
        ("num_threads", c_int32),
        ("pending", c_void_p),
        ("kept", c_void_p),
    )


class _Pending(Structure):
    _fields_ = (("qkv", c_void_p), ("gates", c_void_p))


class _Recurrence(Structure):
    _fields_ = (
        ("decay", c_void_p),
        ("step_bias", c_void_p),
        ("skip", c_void_p),
        ("gate_stride", c_int64),
        ("step_at", c_int64),
    )


class _Heads(Structure):
    _fields_ = tuple((name, c_int32) for name in ("num_key_heads", "num_heads", "key_dim", "value_dim"))


_NORM = (c_void_p, c_void_p, c_int64, c_void_p, c_float, c_int64, c_int64, c_int64, c_void_p, c_int, c_int)
_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "causal_conv": (POINTER(_Sequences), c_void_p, c_int64, c_void_p, c_void_p, c_int64, c_int64, c_void_p, c_int),
    "recurrence": (
        POINTER(_Sequences), POINTER(_Heads), POINTER(_Recurrence), POINTER(_Pending), c_void_p, c_int64, c_void_p,
        c_void_p, c_void_p, c_int,
    ),
    "gated_rms_norm": _NORM,
    "rms_norm_of_gated": _NORM,
    "multiply_sigmoid": (c_void_p, c_void_p, c_int64, c_int64, c_int64, c_int, c_int),
}  # fmt: skip


class CompiledRecurrent:
    """RecurrentOperators in C++, for one dtype of the activations."""

    _causal_conv: Any
    _recurrence: Any
    _gated_rms_norm: Any
    _rms_norm_of_gated: Any
    _multiply_sigmoid: Any

    def __init__(self, library: CpuLibrary, dtype: torch.dtype, instruction_set: InstructionSet | None = None) -> None:
        """Select the kernels; default: those of the fastest instruction set."""
        self._dtype, self._type = dtype, DTYPES[dtype]
        suffix = SUFFIXES[instruction_set or library.instruction_set]
        for name, arguments in _ARGUMENTS.items():
            function = getattr(library.functions, f"pagestream_{name}_{suffix}")
            function.argtypes, function.restype = list(arguments), None
            setattr(self, f"_{name}", function)

    def causal_conv(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor, batch: RecurrentBatch
    ) -> Tensor:
        (width, channels), out = weight.shape, torch.empty(len(x), weight.shape[1], dtype=self._dtype)
        assert x.stride(1) == 1 and x.dtype == self._dtype and weight.is_contiguous() and weight.dtype == torch.float32
        assert states.stride()[1:] == (channels, 1) and (bias is None or bias.dtype == torch.float32)
        self._causal_conv(
            byref(_sequences(states, batch)), x.data_ptr(), x.stride(0), weight.data_ptr(), _address(bias),
            channels, width, out.data_ptr(), self._type,
        )  # fmt: skip
        return out

    def gated_delta(
        self,
        qkv: Tensor,
        gates: Tensor,
        rates: StateRates,
        states: Tensor,
        heads: StateHeads,
        batch: RecurrentBatch,
        pending: PendingInputs | None = None,
    ) -> Tensor:
        rule = _rule(gates, rates, None, step_at=heads.num_heads)
        return self._recur(qkv, gates, rule, states, heads, batch, pending)

    def state_space(
        self,
        qkv: Tensor,
        step: Tensor,
        rates: StateRates,
        skip: Tensor,
        states: Tensor,
        heads: StateHeads,
        batch: RecurrentBatch,
        pending: PendingInputs | None = None,
    ) -> Tensor:
        return self._recur(qkv, step, _rule(step, rates, skip, step_at=0), states, heads, batch, pending)

    def _recur(
        self,
        qkv: Tensor,
        gates: Tensor,
        rule: _Recurrence,
        states: Tensor,
        heads: StateHeads,
        batch: RecurrentBatch,
        pending: PendingInputs | None,
    ) -> Tensor:
        assert qkv.stride(1) == 1 and qkv.dtype == self._dtype
        assert gates.stride(1) == 1 and gates.dtype == self._dtype and states[0].is_contiguous()
        out = torch.empty(len(qkv), heads.value_size, dtype=self._dtype)
        scratch = torch.empty(len(batch.state_blocks) * heads.state_size if batch.may_keep_none else 0)
        kept = _Pending() if pending is None else _Pending(pending.qkv.data_ptr(), pending.gates.data_ptr())
        of_layer = _Heads(heads.num_key_heads, heads.num_heads, heads.key_dim, heads.value_dim)
        self._recurrence(
            byref(_sequences(states, batch)), byref(of_layer), byref(rule), byref(kept), qkv.data_ptr(), qkv.stride(0),
            gates.data_ptr(), scratch.data_ptr(), out.data_ptr(), self._type,
        )  # fmt: skip
        return out

    keep_inputs = TorchRecurrent.keep_inputs  # a few rows

    def gated_rms_norm(
        self, x: Tensor, gate: Tensor, weight: Tensor, eps: float, scaling: Scaling = Scaling.NONE
    ) -> Tensor:
        assert scaling is Scaling.NONE
        return self._norm(self._gated_rms_norm, x, gate, weight, eps, x.shape[1] // len(weight))

    def rms_norm_of_gated(
        self, x: Tensor, gate: Tensor, weight: Tensor, eps: float, num_groups: int, scaling: Scaling = Scaling.NONE
    ) -> Tensor:
        assert scaling is Scaling.NONE
        return self._norm(self._rms_norm_of_gated, x, gate, weight, eps, num_groups)

    def _norm(self, function: Any, x: Tensor, gate: Tensor, weight: Tensor, eps: float, num_parts: int) -> Tensor:
        assert x.is_contiguous() and gate.stride(1) == 1 and x.dtype == gate.dtype == self._dtype
        assert weight.dtype == torch.float32
        out = torch.empty_like(x)
        function(
            x.data_ptr(), gate.data_ptr(), gate.stride(0), weight.data_ptr(), eps, len(x), num_parts,
            x.shape[1] // num_parts, out.data_ptr(), num_threads(), self._type,
        )  # fmt: skip
        return out

    def multiply_sigmoid(self, x: Tensor, gate: Tensor, scaling: Scaling = Scaling.NONE) -> Tensor:
        assert scaling is Scaling.NONE
        assert x.is_contiguous() and gate.stride(1) == 1 and x.dtype == gate.dtype == self._dtype
        self._multiply_sigmoid(
            x.data_ptr(), gate.data_ptr(), gate.stride(0), *x.shape, num_threads(), self._type
        )  # fmt: skip
        return x


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _rule(gates: Tensor, rates: StateRates, skip: Tensor | None, *, step_at: int) -> _Recurrence:
    return _Recurrence(
        rates.decay.data_ptr(), rates.step_bias.data_ptr(), _address(skip), gates.stride(0), step_at
    )  # fmt: skip


def _sequences(states: Tensor, batch: RecurrentBatch) -> _Sequences:
    assert states.dtype == torch.float32
    return _Sequences(
        batch.query_start_loc.data_ptr(), batch.state_blocks.data_ptr(), states.data_ptr(), states.stride(0),
        len(batch.state_blocks), num_threads(), *_addresses(batch.drafts),
    )  # fmt: skip


def _addresses(drafts: DraftedStates | None) -> tuple[int | None, int | None]:
    return (None, None) if drafts is None else (drafts.pending.data_ptr(), drafts.kept.data_ptr())
