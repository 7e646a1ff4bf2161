"""Reservation policies of the paper's baselines."""

import pytest

from bench.paper.reservation import ReservationPolicy, ReservedKVAllocator, make_manager, reserved_tokens
from tests.builders import make_sequence


@pytest.mark.parametrize(
    ("policy", "prompt", "output", "expected"),
    [
        (ReservationPolicy.MAX, 10, 25, 2048),
        (ReservationPolicy.POW2, 10, 25, 42),  # example from the paper: 25 output tokens reserve 32
        (ReservationPolicy.POW2, 10, 32, 42),
        (ReservationPolicy.POW2, 10, 1, 11),
        (ReservationPolicy.POW2, 1500, 500, 2012),
        (ReservationPolicy.POW2, 1500, 513, 2048),
        (ReservationPolicy.ORACLE, 10, 25, 35),
    ],
)
def test_reserved_slots_of_each_policy(policy: ReservationPolicy, prompt: int, output: int, expected: int) -> None:
    assert reserved_tokens(policy, make_sequence(prompt, max_tokens=output), 2048) == expected


def test_reservation_is_contiguous_and_kept_to_the_end() -> None:
    manager = make_manager(ReservationPolicy.ORACLE, num_slots=128, block_size=4, max_model_len=64)
    first, second = make_sequence(5, max_tokens=10), make_sequence(3, max_tokens=30)
    for sequence in (first, second):
        assert manager.can_allocate(sequence)
        manager.allocate(sequence)
    assert first.kv.tables[0].blocks == [1, 2, 3, 4]
    assert second.kv.tables[0].blocks == list(range(17, 26))
    manager.check_integrity([first, second])
    first.output_token_ids = [7] * 9
    assert isinstance(manager, ReservedKVAllocator) and manager.missing(first) == 0, "it never grows"
    manager.free(first)
    assert first.kv.tables[0].blocks == []
    manager.check_integrity([second])


def test_padding_block_is_never_allocated() -> None:
    manager = make_manager(ReservationPolicy.MAX, num_slots=32, block_size=4, max_model_len=16)
    first, second, third = (make_sequence(1) for _ in range(3))
    manager.allocate(first)
    manager.allocate(second)
    assert (first.kv.tables[0].blocks, second.kv.tables[0].blocks) == ([1, 2, 3, 4], [5, 6, 7, 8])
    assert not manager.can_allocate(third)
    assert manager.num_available_blocks == 0


def test_paged_policy_uses_the_engine_manager() -> None:
    manager = make_manager(ReservationPolicy.PAGED, num_slots=15_700, block_size=16, max_model_len=2048)
    assert not isinstance(manager, ReservedKVAllocator)
    assert manager.num_usable_blocks == 981
