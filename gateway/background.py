"""Work that outlives the request handler which began it.

A chat's way back ends here, where its client has gone before its end. It knows nothing of what the work does.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any

from shared.tasks import cancel_and_wait


class BackgroundWork:
    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._detached: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """For what must not be cancelled with the handler that asks for it."""
        _keep(self._tasks, work)

    def detach(self, work: Coroutine[Any, Any, None]) -> None:
        """For what goes on without a client, at most until this gateway ends."""
        _keep(self._detached, work)

    async def finish(self) -> None:
        await cancel_and_wait(self._detached)
        await asyncio.gather(*self._tasks, return_exceptions=True)


def _keep(tasks: set[asyncio.Task[Any]], work: Coroutine[Any, Any, None]) -> None:
    task = asyncio.create_task(work)
    tasks.add(task)
    task.add_done_callback(tasks.discard)
