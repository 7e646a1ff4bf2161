"""Tasks that outlive the request handler that started them."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from shared.tasks import cancel_and_wait

logger = logging.getLogger("gateway")


class BackgroundWork:
    def __init__(self, on_error: Callable[[], None] = lambda: None) -> None:
        """Create the set of tasks. `on_error` is called when one fails; its traceback is logged."""
        self._on_error = on_error
        self._tasks: set[asyncio.Task[Any]] = set()
        self._detached: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Start work that must not be cancelled with its handler; finish() waits for it."""
        self._keep(self._tasks, work)

    def detach(self, work: Coroutine[Any, Any, None]) -> None:
        """Start work that continues without a client; finish() cancels it."""
        self._keep(self._detached, work)

    async def finish(self) -> None:
        """Cancel detached work, and wait for the rest."""
        await cancel_and_wait(self._detached)
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _keep(self, tasks: set[asyncio.Task[Any]], work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        tasks.add(task)

        def ended(task: asyncio.Task[Any]) -> None:
            tasks.discard(task)
            if not task.cancelled() and (error := task.exception()) is not None:
                logger.error("background work: failed", exc_info=error)
                self._on_error()

        task.add_done_callback(ended)
