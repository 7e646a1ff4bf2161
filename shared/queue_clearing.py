"""End all waiting requests of one model, each with a terminal error event.

For an operator who changes the model of a queue (model_identity.py). Requests of live workers continue.
"""

import secrets
from typing import Any

from redis.asyncio import Redis

from shared.messages import ErrorCode, ErrorEvent, encode
from shared.reaping import list_worker_ids, reap_worker
from shared.redis_keys import GROUP, RedisKeys
from shared.redis_scripts import Ending, QueueEntry, ReapMode, RedisScripts, gateway_message, queue_entry

CLEARED_MESSAGE = "an operator cleared the queue"
BATCH_ENTRIES = 100  # per call, so that a call does not block the store for long


async def clear_queue(redis: Redis, keys: RedisKeys) -> int:
    """End the requests. Returns their number.

    Registers as a worker during the call, so each entry is read, claimed, and finished like any other.
    """
    scripts = RedisScripts(redis, keys)
    await _reap_fenced(scripts)
    worker_id = f"clear.{secrets.token_hex(4)}"
    await scripts.register(worker_id)
    num_ended = 0
    try:
        while entries := await _next_entries(scripts, worker_id):
            num_ended += await _end(scripts, worker_id, entries)
    finally:
        await reap_worker(scripts, worker_id, ReapMode.DRAIN)
    return num_ended


async def _reap_fenced(scripts: RedisScripts) -> None:
    """Requeue the requests of dead workers, so that they are cleared too."""
    for worker_id in await list_worker_ids(scripts.redis, scripts.keys):
        if not await scripts.redis.exists(scripts.keys.fence(worker_id)):
            await reap_worker(scripts, worker_id)


async def _next_entries(scripts: RedisScripts, worker_id: str) -> list[QueueEntry]:
    streams: dict[Any, Any] = dict.fromkeys(scripts.keys.queues, ">")
    reply: Any = await scripts.redis.xreadgroup(GROUP, worker_id, streams, count=BATCH_ENTRIES)
    return [queue_entry(queue, entry_id, fields) for queue, entries in reply for entry_id, fields in entries]


async def _end(scripts: RedisScripts, worker_id: str, entries: list[QueueEntry]) -> int:
    claims = await scripts.claim(worker_id, entries)
    endings, messages, num_ended = [], [], 0
    for number, (entry, claim) in enumerate(zip(entries, claims, strict=True)):
        event = ErrorEvent(entry.request_id, ErrorCode.REQUEST_FAILED, CLEARED_MESSAGE)
        endings.append(Ending(entry.request_id, entry.queue, entry.entry_id, encode(event) if claim else b""))
        if claim is not None:
            num_ended += 1
            positions = {entry.request_id: number}
            messages.append(gateway_message(claim.gateway_id, worker_id, 0, [event], positions))
    await scripts.finish(worker_id, endings, messages)
    return num_ended
