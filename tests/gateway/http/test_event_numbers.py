"""Event ids: a reconnecting client gets exactly the events that it does not have."""

import pytest

from gateway.errors import InvalidRequest
from gateway.http.event_numbers import EventNumbers


def event(number: int) -> bytes:
    return b"data: %d\n\n" % number


def test_event_id_continues_the_counts_per_choice() -> None:
    numbers = EventNumbers(2)
    assert numbers.of_choice(1, event(1)) == b"id: 0-1-0\n" + event(1)
    assert numbers.of_choice(0, event(2)) == b"id: 1-1-0\n" + event(2)
    assert numbers.of_usage(event(3)) == b"id: 1-1-1\n" + event(3)
    assert numbers.of_end(event(4)) == b"id: end\n" + event(4)


def test_simultaneous_events_have_one_id_each() -> None:
    assert EventNumbers(1).of_choice(0, event(1) + event(2)) == b"id: 1-0\n" + event(1) + b"id: 2-0\n" + event(2)
    assert EventNumbers(1, "1-0").of_choice(0, event(1) + event(2)) == b"id: 2-0\n" + event(2)
    assert EventNumbers(1).of_end(event(1) + event(2)) == event(1) + b"id: end\n" + event(2)
    assert EventNumbers(1).of_choice(0, b"") == b""


def test_event_id_includes_pending_repeats_of_other_choices() -> None:
    numbers = EventNumbers(2, "1-3-0")
    assert numbers.of_choice(0, event(1)) == b""
    assert numbers.of_choice(0, event(2)) == b"id: 2-3-0\n" + event(2)
    assert [numbers.of_choice(1, event(number)) for number in range(4)] == [b"", b"", b"", b"id: 2-4-0\n" + event(3)]


@pytest.mark.parametrize("last_event_id", ["1", "1-2-3", "-", "1-", "a-1", "1--2", "1-1234567890", "١-1", "end"])
def test_id_of_no_event_is_refused(last_event_id: str) -> None:
    with pytest.raises(InvalidRequest, match="Last-Event-ID"):
        EventNumbers(1, last_event_id)
