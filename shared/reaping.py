"""End worker incarnations and requeue their requests. Used by the reaper of every worker and by the supervisor.

The caller decides which worker is dead: by missed heartbeats (engine_worker/transport/reaper.py), or as its parent.
Safe to repeat, and to run in several processes at once.
"""

from dataclasses import dataclass
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError, ResponseError

from shared.messages import PROTOCOL_VERSION, ErrorCode, ErrorEvent, EventBatch, encode
from shared.redis_client import is_missing_group
from shared.redis_keys import GROUP, RedisKeys
from shared.redis_scripts import PendingEntry, ReapMode, RedisScripts

REAP_BATCH_ENTRIES = 32  # bounds the time of one script call
DEAD_LETTER_MESSAGE = "the request crashed its worker repeatedly and was given up"


@dataclass(frozen=True, slots=True)
class ReapSummary:
    requeued: int = 0
    dead_letters: int = 0
    dropped: int = 0


async def list_worker_ids(redis: Redis, keys: RedisKeys) -> list[str]:
    """Return all incarnations with a consumer in a queue, alive or dead."""
    async with redis.pipeline(transaction=False) as pipeline:  # one round trip: each worker asks once a second
        for queue in keys.queues:
            pipeline.xinfo_consumers(queue, GROUP)
        replies = await pipeline.execute(raise_on_error=False)
    worker_ids: set[str] = set()
    for consumers in replies:
        if not isinstance(consumers, RedisError):
            worker_ids.update(consumer["name"].decode() for consumer in consumers)
        elif not is_missing_group(consumers) and "no such key" not in str(consumers):
            raise consumers
    return sorted(worker_ids)


async def reap_worker(scripts: RedisScripts, worker_id: str, mode: ReapMode = ReapMode.CRASH) -> ReapSummary:
    """Delete a worker's fence, requeue its pending entries or write dead letters, and delete its consumers."""
    requeued = dead_letters = dropped = 0
    for queue in scripts.keys.queues:
        has_more = 1
        while has_more:
            try:
                entries = await _pending_entries(scripts, queue, worker_id)
                reply = await scripts.reap(worker_id, queue, entries, mode)
            except ResponseError as error:
                if not is_missing_group(error):
                    raise
                break
            has_more = reply.has_more
            requeued += reply.requeued
            dead_letters += reply.dead_letters
            dropped += reply.dropped
    await scripts.forget_beats([worker_id])
    return ReapSummary(requeued, dead_letters, dropped)


async def reap_workers_with_prefix(redis: Redis, keys: RedisKeys, base_worker_id: str) -> dict[str, ReapSummary]:
    """Reap all incarnations `BASE.*` of a child that its parent knows to be dead.

    Call it before a successor with the same base starts, or the successor is reaped too.
    """
    scripts = RedisScripts(redis, keys)
    worker_ids = [name for name in await list_worker_ids(redis, keys) if name.startswith(f"{base_worker_id}.")]
    return {worker_id: await reap_worker(scripts, worker_id) for worker_id in worker_ids}


async def _pending_entries(scripts: RedisScripts, queue: str, worker_id: str) -> list[PendingEntry]:
    redis = scripts.redis
    pending = await redis.xpending_range(queue, GROUP, "-", "+", REAP_BATCH_ENTRIES, consumername=worker_id)
    async with redis.pipeline(transaction=False) as pipeline:
        for item in pending:
            pipeline.xrange(queue, item["message_id"], item["message_id"])
        found = await pipeline.execute()
    return [_pending_entry(item["message_id"], entries) for item, entries in zip(pending, found, strict=True)]


def _pending_entry(entry_id: Any, entries: list[Any]) -> PendingEntry:
    # A deleted entry is still pending, but its request is unknown, so it is only acknowledged.
    request_id = entries[0][1][b"r"].decode() if entries else ""
    event = ErrorEvent(request_id, ErrorCode.REQUEST_FAILED, DEAD_LETTER_MESSAGE)
    blob = encode(EventBatch(PROTOCOL_VERSION, "reaper", 0, [event]))
    return PendingEntry(request_id, entry_id, encode(event), blob)
