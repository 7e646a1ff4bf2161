"""How long one answer may have the event loop before others have their turn: text, JSON and events are made in Python,
2 us a token and 200 with 20 log-probabilities beside it, and an answer read again has all of its tokens at one time.
"""

import time

TURN_SECONDS = 0.005


class Turn:
    def __init__(self) -> None:
        self._ends_at = time.monotonic() + TURN_SECONDS

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self._ends_at
