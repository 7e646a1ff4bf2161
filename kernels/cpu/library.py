"""Load the library of C++ kernels once per process and determine the processor's instruction sets.

Callers log the result, because without the library torch's operators are used, which are slower.
"""

import ctypes
from enum import IntEnum
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from kernels.cpu.build import NoLibrary, build, installed_library


class InstructionSet(IntEnum):
    """Instruction sets with their own kernels, from slow to fast. The values are those of csrc/processor.h."""

    AVX2 = 1
    AVX512_VNNI = 2


class CpuLibrary:
    """The loaded library: its `functions` and the `instruction_sets` of this processor, fastest last."""

    def __init__(self, path: Path) -> None:
        """Load the library.

        Raises:
            NoLibrary: If the file cannot be loaded, or the processor has none of the instruction sets.
        """
        self.path = path
        try:
            self.functions = ctypes.CDLL(str(path))
        except OSError as error:
            raise NoLibrary(f"cannot load {path}: {error}") from None
        has = self.functions.pagestream_has_instruction_set
        has.argtypes, has.restype = [ctypes.c_int], ctypes.c_int
        self.instruction_sets = tuple(one for one in InstructionSet if has(one))
        if not self.instruction_sets:
            raise NoLibrary("this processor has no AVX2")

    @property
    def instruction_set(self) -> InstructionSet:
        return self.instruction_sets[-1]


def cpu_library() -> CpuLibrary:
    """Return the library, built and loaded on the first call.

    Raises:
        NoLibrary: With the same reason on every call.
    """
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
        return f"cannot write the library: {error}"


def num_threads() -> int:
    """Return the thread count of torch's operators; the library shares the OpenMP pool that torch has loaded."""
    return torch.get_num_threads()


def address(tensor: Tensor | None) -> int | None:
    """Return the address of the first element, or None. Strides are passed separately."""
    return None if tensor is None else tensor.data_ptr()
