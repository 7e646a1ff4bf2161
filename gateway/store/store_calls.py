"""Store calls, each in its own task, so that a cancelled handler leaves no reply on the connection for the next caller.

Also the errors that callers get instead of redis-py's.
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
    """Base of the errors of this package."""


class Refused(InferenceError):
    """The request was not accepted; the store has nothing of it."""


class QueueFull(Refused):
    """The queue of the request's class is at its cap (answer 503 with Retry-After)."""


class NeedsNewerWorker(Refused):
    """No ready worker has the capabilities that the request needs (answer 503 with Retry-After)."""


class StartsLate(Refused):
    """It would not start within its queue time limit (answer 429 with Retry-After)."""

    def __init__(self, num_ahead: int, per_second: float, limit_seconds: float) -> None:
        """Create the error: `num_ahead` requests wait before it, and the fleet serves `per_second`."""
        self.wait_seconds = num_ahead / per_second
        self.retry_after_seconds = self.wait_seconds - limit_seconds
        super().__init__(f"{num_ahead} requests wait before it, about {self.wait_seconds:.0f} s")
        self.num_ahead = num_ahead


class QueueShareFull(Refused):
    """The key holds its share of the queue (answer 429 with Retry-After)."""

    def __init__(self, max_places: int, num_places: int) -> None:
        """Create the error; the key may hold `max_places` now, of `num_places` for all keys together."""
        super().__init__(f"at most {max_places} of {num_places} queue places now")
        self.max_places = max_places
        self.num_places = num_places


class ShareFull(Refused):
    """The key holds its share of the store's memory (answer 429 with Retry-After)."""

    def __init__(self, max_bytes: int) -> None:
        super().__init__(f"at most {max_bytes} bytes of the store now")
        self.max_bytes = max_bytes


class RequestGone(InferenceError):
    """The store does not have this kept request, or not any more."""


class StoreUnavailable(InferenceError):
    """Redis does not answer or refuses writes (answer 503)."""


class NotReplicated(StoreUnavailable):
    """No replica of the store has the request (answer 503 with Retry-After)."""


class StoreCalls:
    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def own(self, call: Coroutine[Any, Any, _Result]) -> "asyncio.Task[_Result]":
        task = asyncio.create_task(call)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    async def ask(self, call: Coroutine[Any, Any, _Result]) -> _Result:
        """Return the result of `call`, which continues if the caller is cancelled. Raise StoreUnavailable."""
        try:
            return await asyncio.shield(self.own(call))
        except (RedisError, OSError) as error:
            raise StoreUnavailable(str(error)) from error

    async def finish(self, call: Coroutine[Any, Any, Any]) -> None:
        """Wait for `call`, which continues if the caller is cancelled; raise what it raises."""
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
            logger.critical("inference client: task failed", exc_info=error)
