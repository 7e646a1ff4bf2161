"""NVLink connections between the GPUs of this machine, from the driver's library NVML, without CUDA or torch."""

import ctypes
from collections.abc import Collection, Sequence
from itertools import combinations
from typing import TypeAlias

LIBRARY = "libnvidia-ml.so.1"
Links: TypeAlias = Collection[frozenset[str]]  # pairs of GPUs

# nvml.h
_SUCCESS = 0
_P2P_CAPS_INDEX_NVLINK = 2
_P2P_STATUS_OK = 0
_NAME_BYTES = 96


def nvlinks(gpus: Sequence[str], library: str = LIBRARY) -> Links:
    """Return the pairs of `gpus` (numbers or UUIDs) that NVLink connects, directly or through switches.

    Empty without the library, if it does not know one of them, or if they are of several kinds, because CUDA may then
    number them differently from the driver.
    """
    try:
        nvml = ctypes.CDLL(library)
    except OSError:
        return ()
    if nvml.nvmlInit_v2() != _SUCCESS:
        return ()
    try:
        return _links(nvml, gpus)
    finally:
        nvml.nvmlShutdown()


def _links(nvml: ctypes.CDLL, gpus: Sequence[str]) -> Links:
    handles = {gpu: handle for gpu in gpus if (handle := _handle(nvml, gpu)) is not None}
    if len(handles) < len(gpus) or len({_kind(nvml, handle) for handle in handles.values()}) > 1:
        return ()
    return {frozenset(pair) for pair in combinations(gpus, 2) if _are_linked(nvml, *(handles[gpu] for gpu in pair))}


def _handle(nvml: ctypes.CDLL, gpu: str) -> ctypes.c_void_p | None:
    handle = ctypes.c_void_p()
    if gpu.isdecimal():
        status = nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(int(gpu)), ctypes.byref(handle))
    else:
        status = nvml.nvmlDeviceGetHandleByUUID(gpu.encode(), ctypes.byref(handle))
    return handle if status == _SUCCESS else None


def _kind(nvml: ctypes.CDLL, handle: ctypes.c_void_p) -> bytes:
    name = ctypes.create_string_buffer(_NAME_BYTES)
    nvml.nvmlDeviceGetName(handle, name, ctypes.c_uint(_NAME_BYTES))
    return name.value


def _are_linked(nvml: ctypes.CDLL, one: ctypes.c_void_p, other: ctypes.c_void_p) -> bool:
    status = ctypes.c_int(-1)
    found = nvml.nvmlDeviceGetP2PStatus(one, other, ctypes.c_int(_P2P_CAPS_INDEX_NVLINK), ctypes.byref(status))
    return bool(found == _SUCCESS and status.value == _P2P_STATUS_OK)
