"""Ending asyncio tasks for sure.

On Python 3.11 `asyncio.wait_for` returns its result instead of raising when a cancel arrives in the same turn of the
loop, and the Redis client sends every command inside one. So one `cancel()` may vanish, and a wait for the task hangs.

It is used at every stop. It knows no task.
"""

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any

CANCEL_AGAIN_SECONDS = 1.0  # long enough for a clean-up, which a second cancel would break off


async def cancel_and_wait(tasks: Iterable["asyncio.Task[Any]"]) -> None:
    """Cancel until all have ended. Their results and errors stay in them; none is raised here."""
    pending = {task for task in tasks if not task.done()}
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=CANCEL_AGAIN_SECONDS)


async def run_until_first_ends(*coroutines: Coroutine[Any, Any, None]) -> None:
    """Run all until one returns or raises, end the others for sure, and raise what it raised.

    Of several that raised at once, the first argument counts. A TaskGroup would cancel them once only.
    """
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        ended = [task for task in tasks if task.done()]
    finally:
        await cancel_and_wait(tasks)
    for task in ended:
        task.result()
