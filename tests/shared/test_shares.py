"""The dynamic threshold: how much of a resource each key may fill."""

import pytest

from shared.shares import may_take


def fill(capacity: int, num_keys: int) -> list[int]:
    """Return the units of each key after all took one unit in turn until none may take more."""
    held = [0] * num_keys
    progress = True
    while progress:
        progress = False
        for key in range(num_keys):
            if may_take(held[key], 1, capacity - sum(held)):
                held[key] += 1
                progress = True
    return held


@pytest.mark.parametrize(
    ("num_keys", "ratio"),
    [(1, 0.8), (2, 0.444), (4, 0.235)],
    ids=["one_key", "two_keys", "four_keys"],
)
def test_keys_fill_a_resource_to_their_shares(num_keys: int, ratio: float) -> None:
    assert [held / 1000 for held in fill(1000, num_keys)] == pytest.approx([ratio] * num_keys, abs=0.01)


def test_new_key_finds_room_beside_full_share() -> None:
    (held,) = fill(1000, 1)
    assert may_take(0, 100, 1000 - held)


def test_request_larger_than_the_free_part_is_refused() -> None:
    assert not may_take(0, 11, 10)


def test_weight_multiplies_the_threshold() -> None:
    assert may_take(799, 1, 100, weight=2.0)
    assert not may_take(800, 1, 100, weight=2.0)
