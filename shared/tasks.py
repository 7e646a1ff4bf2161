"""Cancel asyncio tasks reliably.

On Python 3.11 `asyncio.wait_for` returns its result instead of raising if a cancellation arrives in the same iteration
of the event loop. The Redis client sends every command inside one. So a single cancel() may be lost, and a wait for the
task hangs.
"""

import asyncio
import logging
from collections.abc import Coroutine, Iterable
from typing import Any

logger = logging.getLogger(__name__)

CANCEL_AGAIN_SECONDS = 1.0  # long enough for a clean-up, which a second cancellation would interrupt


async def cancel_and_wait(tasks: Iterable["asyncio.Task[Any]"]) -> None:
    """Cancel repeatedly until all tasks have ended. Does not raise their errors."""
    pending = {task for task in tasks if not task.done()}
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=CANCEL_AGAIN_SECONDS)


async def run_until_first_ends(*coroutines: Coroutine[Any, Any, None]) -> None:
    """Run all until one returns or raises, end the others, and raise its error.

    If several raise at once, the first argument's error is raised, and others of its type are dropped: when a worker is
    fenced, all find out. A TaskGroup would cancel only once.
    """
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        ended = [task for task in tasks if task.done()]
    finally:
        await cancel_and_wait(tasks)
    try:
        for task in ended:
            task.result()
    except Exception as raised:
        _log_others(tasks, raised)
        raise


def _log_others(tasks: Iterable["asyncio.Task[Any]"], raised: Exception) -> None:
    """Log the errors of other types than the one that was raised."""
    for task in tasks:
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, type(raised)):
            logger.error("task: failed beside another: %r", error)
