"""Memory is returned to the system after a burst, and only then."""

import ctypes

import psutil
import pytest

from gateway.freed_memory import FreedMemory, return_small_pieces


def is_worthwhile_after(*num_open: int) -> list[bool]:
    counts = iter(num_open)
    memory = FreedMemory(lambda: next(counts))
    return [memory.is_worthwhile() for _ in num_open]


def test_memory_is_returned_once_after_a_burst() -> None:
    assert is_worthwhile_after(0, 2000, 1900, 900, 900, 20, 0) == [False, False, False, True, False, True, False]


def test_steady_or_light_load_returns_nothing() -> None:
    assert not any(is_worthwhile_after(*[1000, 800, 1000, 600] * 5, 501))
    assert not any(is_worthwhile_after(0, 99, 0, 99, 0))


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="this C library has no malloc_trim")
def test_freed_pieces_between_kept_ones_go_back() -> None:
    pieces = [bytearray(2_000) for _ in range(40_000)]
    kept = pieces[::100]
    full = psutil.Process().memory_info().rss
    del pieces
    return_small_pieces()
    assert full - psutil.Process().memory_info().rss > 60e6
    assert len(kept) == 400
