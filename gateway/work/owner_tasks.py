"""The tasks that run as long as the gateway. A failure or an early end of one ends the process.

    owners = OwnerTasks()
    task = owners.start("recovery", recovery.run())
    await owners.failed.wait()

An error in one message or one stream does not fail its owner: the owner ends only that message or stream.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from shared.store_errors import StoreRefused

logger = logging.getLogger("gateway")


class OwnerTasks:
    def __init__(self, report: Callable[[str, bool], None] = lambda task, is_up: None) -> None:
        """Create the set. `report`: called with a task's name and whether it runs, at its start and its failure."""
        self.failed = asyncio.Event()
        self.is_refused = False  # the store's configuration cannot be used, so a restart does not help
        self._report = report

    def start(
        self, name: str, work: Coroutine[Any, Any, None], *, may_return: Callable[[], bool] = lambda: False
    ) -> "asyncio.Task[None]":
        """Run `work` until the caller cancels it. `may_return`: whether a return of `work` is not a failure."""
        task = asyncio.create_task(work, name=name)
        task.add_done_callback(lambda task: self._ended(task, may_return))
        self._report(name, True)
        return task

    def _ended(self, task: "asyncio.Task[None]", may_return: Callable[[], bool]) -> None:
        if task.cancelled():
            return
        error = task.exception()
        if error is None and may_return():
            return
        if isinstance(error, StoreRefused):
            logger.critical("%s", error)
            self.is_refused = True
        elif error is not None:
            logger.critical("owner task %s: failed: %r", task.get_name(), error, exc_info=error)
        else:
            logger.critical("owner task %s: ended early", task.get_name())
        self._report(task.get_name(), False)
        self.failed.set()
