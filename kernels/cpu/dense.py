"""Linear layers with float32 and bfloat16 weights in C++ (csrc/dense.h). A row's bits are the same in any batch.

Weights that bfloat16 represents exactly are stored in it, so a bfloat16 checkpoint that computes in float32 reads half
the bytes.
"""

from ctypes import c_int, c_int64, c_void_p

import torch
from torch import Tensor

from kernels.cpu.library import CpuLibrary, InstructionSet, address, num_threads
from kernels.cpu.step import DTYPES, SUFFIXES


class DenseLinear:
    """A packed weight; maps x [T, inputs] to [T, outputs]."""

    def __init__(
        self,
        library: CpuLibrary,
        weight: Tensor,
        bias: Tensor | None = None,
        instruction_set: InstructionSet | None = None,
    ) -> None:
        """Pack the weight.

        Args:
            library: The C++ kernels.
            weight: [outputs, inputs], float32 or bfloat16.
            bias: [outputs], or None.
            instruction_set: Default: the fastest of the processor.
        """
        suffix = SUFFIXES[instruction_set or library.instruction_set]
        panel, pack, self._multiply = (
            getattr(library.functions, f"pagestream_{name}_{suffix}")
            for name in ("dense_panel", "pack_dense", "multiply_dense")
        )
        panel.argtypes, panel.restype = [], c_int64
        pack.argtypes, pack.restype = [c_void_p, c_int64, c_int64, c_void_p, c_int, c_int, c_int], None
        self._multiply.argtypes = [
            c_void_p, c_int64, c_void_p, c_void_p, c_int64, c_int64, c_void_p, c_int, c_int, c_int,
        ]  # fmt: skip
        self._multiply.restype = None
        self.outputs, self.inputs = weight.shape
        weight, width = weight.contiguous(), panel()
        dtype = torch.bfloat16 if _fits_bfloat16(weight) else torch.float32
        self.packed = torch.empty(-(-self.outputs // width), self.inputs, width, dtype=dtype)
        types = DTYPES[weight.dtype], DTYPES[dtype]
        pack(weight.data_ptr(), *weight.shape, self.packed.data_ptr(), num_threads(), *types)
        self._bias = None if bias is None else bias.float().contiguous()

    def __call__(self, x: Tensor, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        """Multiply x [T, inputs] and return [T, outputs] in `dtype`, written to `out` if given."""
        exact = x.float().contiguous()
        output = torch.empty(len(x), self.outputs, dtype=dtype) if out is None else out
        assert output.shape == (len(x), self.outputs) and output.dtype == dtype and output.is_contiguous()
        self._multiply(
            exact.data_ptr(), len(x), self.packed.data_ptr(), address(self._bias), self.outputs, self.inputs,
            output.data_ptr(), num_threads(), DTYPES[self.packed.dtype], DTYPES[dtype],
        )  # fmt: skip
        return output


def serves(tensor: Tensor) -> bool:
    """Return whether the kernels support this tensor."""
    return tensor.dtype in DTYPES and tensor.device.type == "cpu"


def gate_and_mul(
    library: CpuLibrary, gate_up: Tensor, *, is_gelu: bool = False, instruction_set: InstructionSet | None = None
) -> Tensor:
    """Return silu (or tanh-approximated gelu) of the first half times the second half, rounded once.

    Args:
        library: The C++ kernels.
        gate_up: [T, 2 * I], contiguous.
        is_gelu: Use gelu instead of silu.
        instruction_set: Default: the fastest of the processor.

    Returns:
        [T, I], dtype of gate_up.
    """
    function = getattr(
        library.functions, f"pagestream_gate_and_mul_{SUFFIXES[instruction_set or library.instruction_set]}"
    )
    function.argtypes, function.restype = [c_void_p, c_int64, c_int64, c_void_p, c_int, c_int, c_int], None
    assert gate_up.is_contiguous()
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    output = torch.empty(rows, size, dtype=gate_up.dtype)
    function(gate_up.data_ptr(), rows, size, output.data_ptr(), is_gelu, num_threads(), DTYPES[gate_up.dtype])
    return output


def _fits_bfloat16(weight: Tensor) -> bool:
    """Return whether bfloat16 loses no bit: the lower half of every float32 is zero."""
    return weight.dtype == torch.bfloat16 or not (weight.view(torch.int32) & 0xFFFF).any()
