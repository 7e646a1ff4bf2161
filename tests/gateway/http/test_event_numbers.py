"""Ids of events: what a client has is left out, wherever it was cut."""

import pytest

from gateway.errors import InvalidRequest
from gateway.http.event_numbers import EventNumbers


def event(number: int) -> bytes:
    return b"data: %d\n\n" % number


def test_counts_go_on_by_choice() -> None:
    numbers = EventNumbers(2)
    assert numbers.of_choice(1, event(1)) == b"id: 0-1-0\n" + event(1)
    assert numbers.of_choice(0, event(2)) == b"id: 1-1-0\n" + event(2)
    assert numbers.of_usage(event(3)) == b"id: 1-1-1\n" + event(3)
    assert numbers.of_end(event(4)) == b"id: end\n" + event(4)


def test_several_events_at_once_have_an_id_each() -> None:
    assert EventNumbers(1).of_choice(0, event(1) + event(2)) == b"id: 1-0\n" + event(1) + b"id: 2-0\n" + event(2)
    assert EventNumbers(1, "1-0").of_choice(0, event(1) + event(2)) == b"id: 2-0\n" + event(2)
    assert EventNumbers(1).of_end(event(1) + event(2)) == event(1) + b"id: end\n" + event(2)
    assert EventNumbers(1).of_choice(0, b"") == b""


def test_what_one_choice_still_repeats_is_known_to_the_ids_of_another() -> None:
    numbers = EventNumbers(2, "1-3-0")
    assert numbers.of_choice(0, event(1)) == b""
    assert numbers.of_choice(0, event(2)) == b"id: 2-3-0\n" + event(2)
    assert [numbers.of_choice(1, event(number)) for number in range(4)] == [b"", b"", b"", b"id: 2-4-0\n" + event(3)]


@pytest.mark.parametrize("last_event_id", ["1", "1-2-3", "-", "1-", "a-1", "1--2", "1-1234567890", "١-1", "end"])
def test_an_id_of_no_event_is_refused(last_event_id: str) -> None:
    with pytest.raises(InvalidRequest, match="Last-Event-ID"):
        EventNumbers(1, last_event_id)
