"""Fill every tensor that a launcher allocates with NaN, so that unwritten elements are detected.

Two patches of Triton's interpreter save half of the time of these tests without changing a result: its language is
patched once per launch instead of per jitted call, and a shape is described once.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from triton import language as tl
from triton.runtime import interpreter


@pytest.fixture(autouse=True)
def poisoned_allocations() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)  # also fills uninitialized memory: torch.utils.deterministic
    assert torch.empty(1).isnan()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True, scope="session")
def language_patched_once_a_launch() -> Iterator[None]:
    """Patch Triton's language once per launch.

    Triton 3.6 searches its whole language at each call of a jitted function, 165 times per prefill launch, although the
    patch of the launch still holds. That was 0.3 of the time of these tests.
    """
    patch: Callable[..., Any] = interpreter._patch_lang

    def patch_once(fn: Any) -> Any:
        languages = [value for value in fn.__globals__.values() if value is tl or value is tl.core]
        if any(tl.core.is_builtin(member) for lang in languages for member in (lang.load, lang.tensor.__add__)):
            return patch(fn)
        return interpreter._LangPatchScope()  # patches nothing

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(interpreter, "_patch_lang", patch_once)
        yield


@pytest.fixture(autouse=True, scope="session")
def shapes_described_once() -> Iterator[None]:
    """Cache shape descriptions and numpy dtypes.

    Triton 3.6 builds the tuple of constants and types of a shape for each result of each operation (1.1 million in
    test_paged_attention), and a table of all types at each numpy dtype lookup.
    """
    describe_type, look_up = tl.block_type.__init__, interpreter._get_np_dtype
    numpy_types: dict[str, np.dtype[Any]] = {}

    @cache
    def described(dims: tuple[int, ...]) -> tl.block_type:
        described = object.__new__(tl.block_type)
        describe_type(described, tl.float32, list(dims))
        return described

    @cache
    def constants(dims: tuple[int, ...]) -> tl.tuple:
        return tl.tuple([tl.constexpr(size) for size in dims])

    def init_type(self: tl.block_type, element_ty: tl.dtype, shape: Sequence[Any]) -> None:
        like = described(tuple(tl.core._unwrap_if_constexpr(size) for size in shape))
        self.element_ty, self.shape, self.numel = element_ty, like.shape, like.numel
        self.name = f"<{self.shape}, {element_ty}>"

    def init_tensor(self: tl.tensor, handle: object, type: tl.dtype) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape = constants(tuple(type.shape.values) if type.is_block() else ())
        self.numel = tl.constexpr(type.numel if type.is_block() else 1)

    def numpy_type(type: tl.dtype) -> np.dtype[Any]:
        if type.scalar.name not in numpy_types:
            numpy_types[type.scalar.name] = look_up(type.scalar)
        return numpy_types[type.scalar.name]

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(tl.block_type, "__init__", init_type)
        monkeypatch.setattr(tl.tensor, "__init__", init_tensor)
        monkeypatch.setattr(interpreter, "_get_np_dtype", numpy_type)
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Triton 3.6's interpreter takes `range(loaded value)` through int(array of one element), deprecated in numpy 1.25.
    for item in items:
        item.add_marker(pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"))
