"""Give the memory of large buffers back to the system as soon as they are freed.

glibc allocates buffers above a threshold with mmap, so that they leave the process when they are freed. It raises that
threshold to the size of each such buffer that is freed, up to 32 MiB; later buffers then stay in its heap. After 600
unfinished bodies of 2 MiB a gateway kept 386 MiB, with the threshold fixed 80.
"""

import ctypes

MMAP_THRESHOLD_BYTES = 65_536
_M_MMAP_THRESHOLD = -3  # <malloc.h>


def return_large_buffers() -> None:
    """Fix the threshold of glibc's malloc; other C libraries do without."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES)
