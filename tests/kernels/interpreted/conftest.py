"""Outputs start poisoned: every tensor that a launcher allocates is NaN, so that an element nobody writes is seen."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def poisoned_allocations() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)  # also fills uninitialised memory: torch.utils.deterministic
    assert torch.empty(1).isnan()
    yield
    torch.use_deterministic_algorithms(False)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Triton 3.6's interpreter takes `range(loaded value)` through int(array of one element), deprecated in numpy 1.25.
    for item in items:
        item.add_marker(pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"))
