"""Work that outlives the request handler which began it.

A chat's way back ends here, where its client has gone before its end. It knows nothing of what the work does.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from shared.tasks import cancel_and_wait

logger = logging.getLogger("gateway")


class BackgroundWork:
    def __init__(self, on_error: Callable[[], None] = lambda: None) -> None:
        """`on_error` is called when a work fails; its traceback is logged."""
        self._on_error = on_error
        self._tasks: set[asyncio.Task[Any]] = set()
        self._detached: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """For what must not be cancelled with the handler that asks for it."""
        self._keep(self._tasks, work)

    def detach(self, work: Coroutine[Any, Any, None]) -> None:
        """For what goes on without a client, at most until this gateway ends."""
        self._keep(self._detached, work)

    async def finish(self) -> None:
        await cancel_and_wait(self._detached)
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _keep(self, tasks: set[asyncio.Task[Any]], work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        tasks.add(task)

        def ended(task: asyncio.Task[Any]) -> None:
            tasks.discard(task)
            if not task.cancelled() and (error := task.exception()) is not None:
                logger.error("background work failed", exc_info=error)
                self._on_error()

        task.add_done_callback(ended)
