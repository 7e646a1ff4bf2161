"""The library of C++ kernels in this process: built if it is not there yet, loaded once, asked what the processor has.

    cpu_library()   -> CpuLibrary, or raises NoLibrary with the reason, every time the same
    address(tensor) -> what a kernel is called with

Who calls it says in the log what it got: without the library torch's operators serve, slower. Knows no kernel. It is
used at a worker's start.
"""

import ctypes
from enum import IntEnum
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from kernels.cpu.build import NoLibrary, build, installed_library


class InstructionSet(IntEnum):
    """An instruction set with kernels of its own, the faster the later. The numbers are csrc/processor.h's."""

    AVX2 = 1
    AVX512_VNNI = 2


class CpuLibrary:
    """`functions`: of the shared library. `instruction_sets`: that this processor has, the fastest last."""

    def __init__(self, path: Path) -> None:
        """Raises NoLibrary where the file is none, or the processor has none of the instruction sets."""
        self.path = path
        try:
            self.functions = ctypes.CDLL(str(path))
        except OSError as error:
            raise NoLibrary(f"{path} cannot be loaded: {error}") from None
        has = self.functions.pagestream_has_instruction_set
        has.argtypes, has.restype = [ctypes.c_int], ctypes.c_int
        self.instruction_sets = tuple(one for one in InstructionSet if has(one))
        if not self.instruction_sets:
            raise NoLibrary("this processor has no AVX2")

    @property
    def instruction_set(self) -> InstructionSet:
        return self.instruction_sets[-1]


def cpu_library() -> CpuLibrary:
    """Raises NoLibrary."""
    found = _loaded()
    if isinstance(found, str):
        raise NoLibrary(found)
    return found


@cache
def _loaded() -> CpuLibrary | str:
    try:
        return CpuLibrary(installed_library() or build())
    except NoLibrary as error:
        return str(error)
    except OSError as error:
        return f"the library cannot be written: {error}"


def num_threads() -> int:
    """As many as torch's operators take; the library has the same pool, of the OpenMP that torch has loaded."""
    return torch.get_num_threads()


def address(tensor: Tensor | None) -> int | None:
    """Return where the first element is. A kernel is told the strides that it cannot assume."""
    return None if tensor is None else tensor.data_ptr()
