"""The `id:` lines of a stream that can be resumed: how many events of each choice its client has. Pure.

    id: 12-7-0      12 events of choice 0, 7 of choice 1, and no usage yet
    id: end         all of it; a client that comes back with this gets 204, which ends an EventSource

How the choices of one request interleave depends on when their tokens came. What each choice says does not, so counts
by choice mean the same at every gateway, however often the stream is cut.

A token's way back, behind its format, where the answer is kept. It knows an event's end, and nothing of what it says.
"""

import re

from gateway.errors import InvalidRequest

END = "end"
HEADER = "Last-Event-ID"


class EventNumbers:
    def __init__(self, num_choices: int, last_event_id: str = "") -> None:
        """`last_event_id`: what the client has already; empty for nothing. Raises InvalidRequest."""
        self._sent = [0] * (num_choices + 1)  # the last is that of the usage
        self._seen = _counts(last_event_id, len(self._sent))

    def of_choice(self, index: int, events: bytes) -> bytes:
        """The next events of a choice, each with its id; without those that the client has."""
        numbered = []
        for event in _split(events):
            self._sent[index] += 1
            if self._sent[index] > self._seen[index]:
                counts = map(max, self._sent, self._seen)
                numbered.append(b"id: %s\n%s" % ("-".join(map(str, counts)).encode(), event))
        return b"".join(numbered)

    def of_usage(self, events: bytes) -> bytes:
        return self.of_choice(-1, events)

    def of_end(self, events: bytes) -> bytes:
        """The last one has the id: who did not get that is told all of them again."""
        *others, last = _split(events)
        return b"".join(others) + b"id: %s\n%s" % (END.encode(), last)


def first_events(count: int) -> str:
    """The id of the event of an only choice with which its client has so many."""
    return f"{count}-0"


def _split(events: bytes) -> list[bytes]:
    """JSON holds no line break, so an empty line ends an event."""
    return [event + b"\n\n" for event in events.split(b"\n\n")[:-1]]


def _counts(last_event_id: str, length: int) -> list[int]:
    if not last_event_id:
        return [0] * length
    if not re.fullmatch(r"[0-9]{1,9}(-[0-9]{1,9})*", last_event_id) or last_event_id.count("-") != length - 1:
        raise InvalidRequest(f"{HEADER}: {last_event_id[:100]!r} is no id of an event of this stream.", param=HEADER)
    return [int(count) for count in last_event_id.split("-")]
