"""Garbage collection: loaded objects are frozen, and garbage of requests is still collected."""

import gc
import weakref

import pytest

from shared.garbage_collection import YOUNG_OBJECTS, no_searches, search_rarely

pytestmark = pytest.mark.usefixtures("garbage_as_before")


class Cycle:
    def __init__(self) -> None:
        self.itself = self


def test_gc_skips_loaded_objects_and_collects_garbage() -> None:
    loaded = [[number] for number in range(1_000)]
    before = weakref.ref(Cycle())
    search_rarely()
    assert before() is None
    assert gc.get_freeze_count() > len(loaded) and not any(item is loaded for item in gc.get_objects())
    after = weakref.ref(Cycle())
    assert after() is not None
    many = [[number] for number in range(YOUNG_OBJECTS + 1_000)]
    assert after() is None and many


def test_no_searches_disables_gc_and_restores_after_error() -> None:
    with pytest.raises(ImportError), no_searches():
        assert not gc.isenabled()
        raise ImportError
    assert gc.isenabled()
