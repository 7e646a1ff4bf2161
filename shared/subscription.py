"""A pub/sub subscription that survives its connection.

It reconnects with a back-off after store errors, and returns GAP after every (re)subscribe, because messages may have
been lost. Otherwise a dead TCP connection is silent, so it pings, and reconnects after two unanswered pings. Use it in
one task, and close it with aclose().
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

from redis.asyncio import Redis
from redis.exceptions import RedisError

from shared.store_errors import Backoff

MAX_UNANSWERED_PINGS = 2

logger = logging.getLogger(__name__)


class Gap(Enum):
    GAP = "gap"


GAP: Final = Gap.GAP


@dataclass(frozen=True, slots=True)
class Message:
    channel: str
    data: bytes


class Subscription:
    def __init__(
        self,
        redis: Redis,
        channels: Sequence[str],
        *,
        ping_seconds: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.num_replies = 0  # replies of any kind; while it grows, missing messages were not sent
        self._redis = redis
        self._channels = tuple(channels)
        self._ping_seconds = ping_seconds
        self._clock = clock
        self._pubsub: Any = None
        self._num_confirmed = 0
        self._unanswered_pings = 0
        self._next_ping = 0.0
        self._backoff = Backoff()

    async def get(self, timeout_seconds: float) -> Message | Gap | None:
        """Return the next message or gap, or None after at most `timeout_seconds`."""
        try:
            if self._pubsub is None:
                await self._subscribe()
            await self._ping_when_due()
            until_ping = max(self._next_ping - self._clock(), 0.0)
            reply = await self._pubsub.get_message(timeout=min(timeout_seconds, until_ping))
            _raise_if_cancelled()
            return self._understood(reply)
        except (RedisError, OSError) as error:
            _raise_if_cancelled()
            logger.warning("subscription %s: lost: %s", ", ".join(self._channels), error)
            await self.aclose()
            await asyncio.sleep(min(self._backoff.next_delay(), timeout_seconds))
            return None

    def rest_until(self, moment: float) -> None:
        """Send no ping before `moment` of the clock. For callers that need one reply per period and got it."""
        self._next_ping = max(self._next_ping, moment)

    async def aclose(self) -> None:
        pubsub, self._pubsub = self._pubsub, None
        if pubsub is not None:
            await pubsub.aclose()

    async def _subscribe(self) -> None:
        self._pubsub = self._redis.pubsub()
        self._num_confirmed = self._unanswered_pings = 0
        self._next_ping = self._clock() + self._ping_seconds
        await self._pubsub.subscribe(*self._channels)

    async def _ping_when_due(self) -> None:
        # What has arrived makes a ping unnecessary; if it is a close, a write on the connection would fail.
        if self._clock() < self._next_ping or await self._pubsub.connection.can_read():
            return
        if self._unanswered_pings >= MAX_UNANSWERED_PINGS:
            raise ConnectionError(f"{self._unanswered_pings} pings without an answer")
        self._unanswered_pings += 1
        self._next_ping = self._clock() + self._ping_seconds
        await self._pubsub.ping()

    def _understood(self, message: dict[str, Any] | None) -> Message | Gap | None:
        if message is None:
            return None
        self.num_replies += 1
        self._unanswered_pings = 0
        self._next_ping = self._clock() + self._ping_seconds  # a reply makes a ping unnecessary
        if message["type"] == "message":
            return Message(message["channel"].decode(), message["data"])
        if message["type"] == "subscribe":
            self._num_confirmed += 1
            # More confirmations than channels: the client library has reconnected by itself, which is a gap too.
            if self._num_confirmed >= len(self._channels):
                self._backoff.reset()
                return GAP
        return None


def _raise_if_cancelled() -> None:
    """Raise a cancellation that the client library lost (9 of 300 in the first 10 ms), so that the task ends."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError
