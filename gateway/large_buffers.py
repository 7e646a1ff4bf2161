"""Return the memory of large buffers to the system as soon as they are freed.

glibc uses mmap for allocations above a threshold, and unmaps them when they are freed. It raises the threshold to the
size of each freed buffer, up to 32 MiB; later buffers then stay in the heap. Measured after 600 unfinished bodies of
2 MiB: 386 MiB with the moving threshold, 80 MiB with a fixed one.
"""

import ctypes

MMAP_THRESHOLD_BYTES = 65_536
_M_MMAP_THRESHOLD = -3  # <malloc.h>


def return_large_buffers() -> None:
    """Fix the mmap threshold of glibc's malloc; does nothing with other C libraries."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES)
