"""Recorded programs of kernels: their results, refusals and reuse of memory."""

import pytest
import torch

from kernels.cpu.library import CpuLibrary
from kernels.cpu.linear import PackedLinear, linear_kernels, quantized
from kernels.cpu.program import Buffers, NotRecordable, recording
from kernels.cpu.step import StepKernels

HIDDEN, ROWS, EPS = 96, 5, 1e-5


class Block:
    """A norm and two linear layers, as in a network."""

    def __init__(self, library: CpuLibrary) -> None:
        torch.manual_seed(0)
        self._kernels = StepKernels(library, 32, torch.float32, torch.float32)
        self._norm = torch.rand(HIDDEN)
        self._up, self._down = (
            PackedLinear(quantized(torch.randn(outputs, inputs)), inputs, kernel=kernel_of(library))
            for outputs, inputs in ((160, HIDDEN), (HIDDEN, 160))
        )

    def __call__(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Return the block's result; `x` becomes x + residual."""
        return self._down(self._up(self._kernels.add_rms_norm(x, residual, self._norm, EPS)))


def kernel_of(library: CpuLibrary) -> object:
    """Return the kernel that records when `library` does."""
    found = getattr(library.functions, f"pagestream_linear_{'avx2' if library.instruction_set == 1 else 'avx512'}")
    found.argtypes, found.restype = next(iter(linear_kernels().values())).argtypes, None
    return found


@pytest.fixture(scope="module")
def real(library: CpuLibrary) -> CpuLibrary:
    if not hasattr(library.functions, "pagestream_linear_avx2"):
        pytest.skip("the emulated library has no linear layers")
    return library


@pytest.mark.parametrize("rows", [1, ROWS, 40])
def test_program_replays_its_kernels(real: CpuLibrary, rows: int) -> None:
    block, buffers = Block(real), Buffers()
    x, residual = buffers.take((rows, HIDDEN), torch.float32), buffers.take((rows, HIDDEN), torch.float32)
    x.fill_(3.0)
    with recording(real, buffers) as recorded:
        result = block(x, residual)
        for _ in range(3):
            result = block(result, x)
    assert recorded.program.num_operations == 4 * 5
    assert (x == 3.0).all(), "a recording computes nothing"
    for _ in range(3):
        first, second = torch.randn(2, rows, HIDDEN)
        x.copy_(first)
        residual.copy_(second)
        recorded.program.run()
        wanted = block(first, second)
        for _ in range(3):
            wanted = block(wanted, first)
        assert torch.equal(result, wanted)


def test_torch_operator_in_a_program_is_refused(real: CpuLibrary) -> None:
    block, x, residual = Block(real), torch.randn(ROWS, HIDDEN), torch.zeros(ROWS, HIDDEN)
    with pytest.raises(NotRecordable, match="mul_"), recording(real, Buffers()):
        block(x, residual).mul_(2.0)
    assert torch.equal(block(x.clone(), x), block(x.clone(), x))


@pytest.mark.parametrize("is_inference", [False, True])
def test_only_real_views_are_recorded(real: CpuLibrary, is_inference: bool) -> None:
    """In inference mode to() and contiguous() are called by name, and their schema says that they are views."""
    block, x, residual = Block(real), torch.randn(ROWS, HIDDEN), torch.zeros(ROWS, HIDDEN)
    with torch.inference_mode(is_inference):
        with recording(real, Buffers()):
            block(x, residual)[1:].to(torch.float32).contiguous().view(-1)
        for copied in (lambda y: y.to(torch.bfloat16), lambda y: y[:, ::2].contiguous(), lambda y: y.T.reshape(-1)):
            with pytest.raises(NotRecordable, match="is not a C"), recording(real, Buffers()):
                copied(block(x, residual))


def test_memory_is_reused_after_its_last_view() -> None:
    buffers = Buffers()
    first = buffers.take((4, 8), torch.float32)
    view, address = first[1:], first.data_ptr()
    assert address % 64 == 0
    del first
    assert buffers.take((4, 8), torch.float32).data_ptr() != address
    del view
    assert buffers.take((2, 8), torch.float32).data_ptr() == address
