"""How full the queues are: for metrics, admission and readiness. Read-only; decides nothing.

The age of the oldest entry is told by the server's clock from the entry's id. It is shown, never acted on.
"""

from dataclasses import dataclass
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from shared.redis_keys import GROUP, RedisKeys


@dataclass(frozen=True, slots=True)
class QueueStats:
    depth: int = 0  # accepted and not finished: waiting + pending
    pending: int = 0  # held by a worker
    waiting: int = 0
    oldest_waiting_seconds: float = 0.0
    dead_letters: int = 0


async def read_queue_stats(redis: Redis, keys: RedisKeys) -> QueueStats:
    depth = pending = 0
    oldest_milliseconds: list[int] = []
    for queue in keys.queues:
        depth += await redis.xlen(queue)
        group = await _group(redis, queue)
        pending += group["pending"] if group else 0
        last_delivered: bytes = group["last-delivered-id"] if group else b"0-0"
        first_waiting: Any = await redis.xrange(queue, f"({last_delivered.decode()}", "+", count=1)
        if first_waiting:
            oldest_milliseconds.append(int(first_waiting[0][0].split(b"-")[0]))
    seconds, microseconds = await redis.time()
    now_milliseconds = seconds * 1000 + microseconds // 1000
    oldest = max((now_milliseconds - added for added in oldest_milliseconds), default=0)
    dead_letters = await redis.xlen(keys.dead_letters)
    return QueueStats(depth, pending, depth - pending, max(oldest, 0) / 1000, dead_letters)


async def _group(redis: Redis, queue: str) -> dict[str, Any] | None:
    try:
        groups: Any = await redis.xinfo_groups(queue)
    except ResponseError as error:
        if "no such key" not in str(error):
            raise
        return None
    return next((group for group in groups if group["name"] == GROUP.encode()), None)
