"""Record calls of C++ kernels and run them as one program, which wakes the threads only once (csrc/program.cpp).

Inside recording(), kernels write nothing; their calls are kept with their addresses. A torch operator would read values
that are not computed yet, so it raises NotRecordable. Allocations come from Buffers, which reuse memory as soon as no
tensor refers to it.
"""

import ctypes
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kernels.cpu.library import CpuLibrary, num_threads

_LINE = 64  # bytes per cache line; buffers are aligned to it
_REFERENCES_OF_FREE = 3  # of an array without tensors: the list, the loop variable and the argument of getrefcount()


class NotRecordable(RuntimeError):
    """A torch operator was called in a recording; the message names it."""


class Buffers:
    """Memory shared by programs that never run at the same time."""

    def __init__(self) -> None:
        self._arrays: list[NDArray[np.uint8]] = []  # ascending size

    def take(self, size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return an uninitialized tensor; its memory is reusable once no tensor refers to it."""
        num_bytes = int(np.prod(size, dtype=np.int64)) * dtype.itemsize
        array = self._free(num_bytes + _LINE)
        start = -array.ctypes.data % _LINE
        return torch.from_numpy(array[start : start + num_bytes]).view(dtype).view(size)

    def _free(self, num_bytes: int) -> NDArray[np.uint8]:
        for array in self._arrays:
            if len(array) >= num_bytes and sys.getrefcount(array) <= _REFERENCES_OF_FREE:
                return array
        new = np.empty(num_bytes, dtype=np.uint8)
        self._arrays = sorted([*self._arrays, new], key=len)
        return new


class Program:
    def __init__(self, library: CpuLibrary, address: int) -> None:
        functions = library.functions
        self._address = address
        self._run = _function(functions.pagestream_run_program, [ctypes.c_void_p, ctypes.c_int], None)
        self._free = _function(functions.pagestream_free_program, [ctypes.c_void_p], None)
        count = _function(functions.pagestream_program_size, [ctypes.c_void_p], ctypes.c_int)
        self.num_operations: int = count(address)

    def run(self) -> None:
        self._run(self._address, num_threads())

    def __del__(self) -> None:
        self._free(self._address)


class Recorded:
    program: Program  # set when the recording ends


@contextmanager
def recording(library: CpuLibrary, buffers: Buffers) -> Iterator[Recorded]:
    """Record the kernels called by this thread.

    Raises:
        NotRecordable: If a torch operator other than a view or an allocation is called.
        MemoryError: If the program cannot be allocated.
    """
    functions, recorded = library.functions, Recorded()
    end = _function(functions.pagestream_end_recording, [], ctypes.c_void_p)
    _function(functions.pagestream_begin_recording, [], None)()
    try:
        with _KernelsAlone(buffers):
            yield recorded
    except BaseException:
        if (address := end()) is not None:
            Program(library, address)
        raise
    if (address := end()) is None:
        raise MemoryError("out of memory for a program of kernels")
    recorded.program = Program(library, address)


class _KernelsAlone(TorchDispatchMode):
    def __init__(self, buffers: Buffers) -> None:
        super().__init__()
        self._buffers = buffers

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: nothing is compiled here, and True would import torch.compile, 1.4 s of a start."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options = kwargs or {}
        if func is torch.ops.aten.empty.memory_format:
            return self._buffers.take(tuple(args[0]), options.get("dtype") or torch.get_default_dtype())
        if func is torch.ops.aten.empty_like.default:
            return self._buffers.take(tuple(args[0].shape), options.get("dtype") or args[0].dtype)
        if not func.is_view:
            raise NotRecordable(f"{func} is not a C++ kernel")
        found = func(*args, **options)
        if _storages(found) - _storages(args):  # to() and contiguous() return views if there is nothing to do
            raise NotRecordable(f"{func} copies and is not a C++ kernel")
        return found


def _storages(tensors: Any) -> set[int]:
    """Return the storage addresses of all tensors in a call or result."""
    return {leaf.untyped_storage().data_ptr() for leaf in tree_leaves(tensors) if isinstance(leaf, Tensor)}


def _function(function: Any, arguments: list[Any], result: Any) -> Callable[..., Any]:
    function.argtypes, function.restype = arguments, result
    found: Callable[..., Any] = function
    return found
