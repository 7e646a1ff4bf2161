"""The `id:` lines of a resumable stream: the number of events of each choice that the client has. Pure.

    id: 12-7-0      12 events of choice 0, 7 of choice 1, and no usage event yet
    id: end         the whole stream; a client that reconnects with it gets 204, which stops an EventSource

How the choices of one request interleave depends on when their tokens arrive, but each choice's own events do not.
Counts per choice therefore mean the same at every gateway, however often the stream is interrupted.
"""

import re

from gateway.errors import InvalidRequest

END = "end"
HEADER = "Last-Event-ID"


class EventNumbers:
    def __init__(self, num_choices: int, last_event_id: str = "") -> None:
        """Create the counters; `last_event_id` is what the client already has, or empty. Raise InvalidRequest."""
        self._sent = [0] * (num_choices + 1)  # the last is that of the usage
        self._seen = _counts(last_event_id, len(self._sent))

    def of_choice(self, index: int, events: bytes) -> bytes:
        """Return the next events of a choice, each with its id, without those that the client already has."""
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
        """Return the final events. Only the last has an id: a client that missed it gets the group again."""
        *others, last = _split(events)
        return b"".join(others) + b"id: %s\n%s" % (END.encode(), last)


def first_events(count: int) -> str:
    """Return the id that means `count` events of a stream with one choice."""
    return f"{count}-0"


def _split(events: bytes) -> list[bytes]:
    """Split at empty lines: JSON contains no line break, so an empty line ends an event."""
    return [event + b"\n\n" for event in events.split(b"\n\n")[:-1]]


def _counts(last_event_id: str, length: int) -> list[int]:
    if not last_event_id:
        return [0] * length
    if not re.fullmatch(r"[0-9]{1,9}(-[0-9]{1,9})*", last_event_id) or last_event_id.count("-") != length - 1:
        raise InvalidRequest(f"{HEADER}: {last_event_id[:100]!r} is not an event id of this stream.", param=HEADER)
    return [int(count) for count in last_event_id.split("-")]
