"""Calls of the store, each in a task of its own: a cancelled handler must not leave a reply behind for the next caller.

Also the errors that callers see instead of redis-py's.

A chat's way in, around every call of the store. It knows no key and no script.
"""

import asyncio
import logging
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from redis.exceptions import RedisError

from shared.redis_scripts import NameTaken
from shared.tasks import cancel_and_wait

logger = logging.getLogger(__name__)
_Result = TypeVar("_Result")


class InferenceError(Exception):
    """A request that was not accepted, or a store that does not answer."""


class Refused(InferenceError):
    """The store has nothing of it."""


class QueueFull(Refused):
    """The queue of its class is at its cap (answer 503 with Retry-After)."""


class NeedsNewerWorker(Refused):
    """No ready worker has the capabilities that it needs (answer 503 with Retry-After)."""


class QueueShareFull(Refused):
    """Its key holds as many queue places as it may (answer 429 with Retry-After)."""

    def __init__(self, max_places: int, num_places: int) -> None:
        """`max_places`: of the key now; `num_places`: of all keys together."""
        super().__init__(f"{max_places} of {num_places} places")
        self.max_places = max_places
        self.num_places = num_places


class ShareFull(Refused):
    """Its key holds as much in the store as it may (answer 429 with Retry-After)."""

    def __init__(self, max_bytes: int) -> None:
        super().__init__(f"{max_bytes} bytes")
        self.max_bytes = max_bytes


class RequestGone(InferenceError):
    """A kept request that the store does not have any more, or never had."""


class StoreUnavailable(InferenceError):
    """Redis does not answer or refuses writes (answer 503)."""


class StoreCalls:
    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def own(self, call: Coroutine[Any, Any, _Result]) -> "asyncio.Task[_Result]":
        task = asyncio.create_task(call)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    async def ask(self, call: Coroutine[Any, Any, _Result]) -> _Result:
        """Its result; the call goes on when the caller is cancelled. Raises StoreUnavailable."""
        try:
            return await asyncio.shield(self.own(call))
        except (RedisError, OSError) as error:
            raise StoreUnavailable(str(error)) from error

    async def finish(self, call: Coroutine[Any, Any, Any]) -> None:
        """It goes on when the caller is cancelled, and raises what it raises."""
        await asyncio.shield(self.own(call))

    async def try_within(self, seconds: float, call: Coroutine[Any, Any, Any]) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.finish(call)

    async def aclose(self) -> None:
        await cancel_and_wait(self._tasks)

    def _ended(self, task: "asyncio.Task[Any]") -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, (InferenceError, NameTaken, RedisError, OSError)):
            logger.critical("a task of the inference client failed", exc_info=error)
