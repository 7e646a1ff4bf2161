"""Turns to read on in long bodies.

A read has up to 256 KiB and takes 0.7 ms. When 600 clients sent 2 MiB each at once, iterations that read from all of
them held up every stream for 400 ms.
"""

import asyncio
from functools import partial

from aiohttp import StreamReader

from gateway.http.turns import Turns

READS_PER_ITERATION = 2
LONG_BYTES = 65_536  # shorter bodies wait for no turn


class ReadTurns:
    def __init__(self) -> None:
        self._turns = Turns(READS_PER_ITERATION, READS_PER_ITERATION)

    async def read(self, content: StreamReader) -> bytes:
        """Return what has arrived of a body, b"" at its end; of a long one, in its turn.

        aiohttp reads no more from a connection while much of its body waits here.
        """
        if content.total_bytes >= LONG_BYTES and not content.is_eof():
            await self.wait()
        return await content.readany()

    async def wait(self) -> None:
        """Return when it is the caller's turn."""
        turn = asyncio.get_running_loop().create_future()
        self._turns.add(partial(_give, turn))
        await turn


def _give(turn: asyncio.Future[None]) -> None:
    if not turn.done():  # canceled with its reader
        turn.set_result(None)
