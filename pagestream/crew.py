"""The children of one supervisor together: if one is given up, all are stopped; the stop goes rank by rank.

It stands around the children of `serve`, from their start to the stop. It knows no store and no request, and not what
a child is.
"""

import asyncio
import itertools
from collections.abc import Coroutine
from typing import Any, TypeVar

from pagestream.supervised import SupervisedChild

_T = TypeVar("_T")


class Crew:
    def __init__(self) -> None:
        self._children: list[tuple[int, SupervisedChild]] = []
        self._tasks: list[asyncio.Task[Any]] = []
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def children(self) -> list[SupervisedChild]:
        return [child for _rank, child in self._children]

    def start(self, child: SupervisedChild, *, stop_rank: int) -> None:
        """Keep `child` alive from now on. Lower ranks are stopped first, equal ones at the same time."""
        self._children.append((stop_rank, child))
        self.watch(child.run(), name=child.name)

    def watch(self, duty: Coroutine[Any, Any, Any], *, name: str) -> None:
        """Run a coroutine that is not to end; its error ends the whole."""
        task = asyncio.create_task(duty, name=name)
        task.add_done_callback(self._note_end)
        self._tasks.append(task)

    async def while_all_live(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Await `work`; raise the error of a child that is given up meanwhile."""
        task = asyncio.create_task(work)
        try:
            either: set[asyncio.Future[Any]] = {task, self._failure}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if self._failure.done():
                self._failure.result()
            return await task
        finally:
            task.cancel()
            await asyncio.wait({task})

    async def stop(self, grace_seconds: float) -> None:
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        in_order = sorted(self._children, key=lambda entry: entry[0])
        for _rank, group in itertools.groupby(in_order, key=lambda entry: entry[0]):
            await asyncio.gather(*(child.stop(grace_seconds) for _, child in group))
        self._failure.cancel()

    def kill(self) -> None:
        for _rank, child in self._children:
            child.kill()

    def _note_end(self, task: asyncio.Task[Any]) -> None:
        if task.cancelled() or self._failure.done():
            return
        self._failure.set_exception(task.exception() or RuntimeError(f"{task.get_name()} ended"))
