"""How many lines of one batch may be in flight, by number and by bytes: bodies of 2 MiB are none to have 64 of.

Before a line's way in: driver.py asks it how many to begin. It knows no key and no other batch.
"""

import asyncio

MAX_BYTES = 4 * 2**20


class Room:
    def __init__(self, max_lines: int) -> None:
        self._max_lines = max_lines
        self._num_lines = 0
        self._num_bytes = 0
        self._changed = asyncio.Event()

    async def enter(self, num_bytes: int) -> None:
        """One always may, however large. For one caller at a time."""
        while self._num_lines and (self._num_lines >= self._max_lines or self._num_bytes + num_bytes > MAX_BYTES):
            self._changed.clear()
            await self._changed.wait()
        self._num_lines += 1
        self._num_bytes += num_bytes

    def leave(self, num_bytes: int) -> None:
        self._num_lines -= 1
        self._num_bytes -= num_bytes
        self._changed.set()
