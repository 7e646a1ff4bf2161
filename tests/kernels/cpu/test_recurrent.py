"""The C++ kernels of recurrent layers equal torch in float64, and chunks change no bit."""

import pytest
import torch

from kernels.cpu.library import InstructionSet, cpu_library
from kernels.cpu.recurrent import CompiledRecurrent
from kernels.recurrent.batch import StateHeads
from tests.kernels.recurrent_cases import SHAPES, Shape, check, check_chunks, check_drafts, check_mamba

INSTRUCTION_SETS = cpu_library().instruction_sets
ODD = {
    "no whole vectors": Shape(StateHeads(3, 3, 7, 11), 3, (4, 9), (1, 2)),
    "a head of 600": Shape(StateHeads(1, 2, 520, 600), 4, (5,), (1,)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", [*SHAPES, *ODD])
@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_operators_equal_torch_in_float64(instruction_set: InstructionSet, name: str, dtype: torch.dtype) -> None:
    check(CompiledRecurrent(cpu_library(), dtype, instruction_set), {**SHAPES, **ODD}[name], dtype)
    check_mamba(CompiledRecurrent(cpu_library(), dtype, instruction_set), {**SHAPES, **ODD}[name], dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("num_threads", [1, 3])
def test_chunks_and_threads_change_no_bit(
    instruction_set: InstructionSet, dtype: torch.dtype, num_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kernels.cpu.recurrent.num_threads", lambda: num_threads)
    check_chunks(CompiledRecurrent(cpu_library(), dtype, instruction_set), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_wrong_drafts_change_no_bit(instruction_set: InstructionSet, dtype: torch.dtype) -> None:
    check_drafts(CompiledRecurrent(cpu_library(), dtype, instruction_set), dtype)
