"""Outputs start poisoned: every tensor that a launcher allocates is NaN, so that an element nobody writes is seen.

The interpreter's language is patched once a launch, not once a call of a function within it.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from triton import language as tl
from triton.runtime import interpreter


@pytest.fixture(autouse=True)
def poisoned_allocations() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)  # also fills uninitialised memory: torch.utils.deterministic
    assert torch.empty(1).isnan()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True, scope="session")
def language_patched_once_a_launch() -> Iterator[None]:
    """Triton 3.6 searches all of its language for what to patch at each call of a jitted function, 165 times a launch
    of prefill; what the launch has patched stays so until it ends. That was 0.3 of the time of these tests."""
    patch: Callable[..., Any] = interpreter._patch_lang

    def patch_once(fn: Any) -> Any:
        languages = [value for value in fn.__globals__.values() if value is tl or value is tl.core]
        if any(tl.core.is_builtin(member) for lang in languages for member in (lang.load, lang.tensor.__add__)):
            return patch(fn)
        return interpreter._LangPatchScope()  # of nothing

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(interpreter, "_patch_lang", patch_once)
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Triton 3.6's interpreter takes `range(loaded value)` through int(array of one element), deprecated in numpy 1.25.
    for item in items:
        item.add_marker(pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"))
