"""Calls of C++ kernels recorded once and run as one: threads wake once for all of them (csrc/program.cpp).

    with recording(library) as recorded:
        ...                       # kernels write nothing, what they are called with is kept
    recorded.program.run()        # in their order, on the memory that they were given

An operator of torch inside a recording would read what is not computed yet, so it is refused: NotRecordable.
Allocations come from Buffers, where what one call has read makes room for the next one. It is used on a CPU, in
a decoding step of a shape that was recorded before. Knows no kernel.
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

_LINE = 64  # bytes of a cache's line, where a buffer begins
_REFERENCES_OF_FREE = 3  # to an array that no tensor lies in: the list's, the loop's and that of the question


class NotRecordable(RuntimeError):
    """An operator that is no C++ kernel was called in a recording; the message names it."""


class Buffers:
    """Memory of programs that never run at the same time."""

    def __init__(self) -> None:
        self._arrays: list[NDArray[np.uint8]] = []  # the smallest first

    def take(self, size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """An empty tensor; its memory is free again as soon as neither it nor a view of it is left."""
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
    program: Program  # once the recording has ended


@contextmanager
def recording(library: CpuLibrary, buffers: Buffers) -> Iterator[Recorded]:
    """Record the kernels that this thread calls. Raises NotRecordable, MemoryError."""
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
        raise MemoryError("no memory for a program of kernels")
    recorded.program = Program(library, address)


class _KernelsAlone(TorchDispatchMode):
    def __init__(self, buffers: Buffers) -> None:
        super().__init__()
        self._buffers = buffers

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: nothing is compiled here. What keeps torch.compile out of this mode imports it, 1.4 s of a start."""
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
            raise NotRecordable(f"{func} is no C++ kernel")
        found = func(*args, **options)
        if _storages(found) - _storages(args):  # to() and contiguous() are views where there is nothing to do
            raise NotRecordable(f"{func} copies and is no C++ kernel")
        return found


def _storages(tensors: Any) -> set[int]:
    """The addresses of what the tensors of a call or of its result lie in."""
    return {leaf.untyped_storage().data_ptr() for leaf in tree_leaves(tensors) if isinstance(leaf, Tensor)}


def _function(function: Any, arguments: list[Any], result: Any) -> Callable[..., Any]:
    function.argtypes, function.restype = arguments, result
    found: Callable[..., Any] = function
    return found
