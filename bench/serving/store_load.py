"""python -m bench store-load: what many requests of many keys cost the store, and how soon it ends abandoned ones.

Each request has an API key of its own, with limits per minute, and a gateway that is gone. A worker claims them all.
Then the product's reaper ends them after their grace time of 60 s. Printed are the seconds until the last has ended,
the scripts that took longer than 5 ms, and the store's memory: before, with all requests, and after everything that
expires has expired. Ended requests, which are kept for ten minutes, and the accounts of keys, kept for two hours, are
deleted at once.

The times are of the clock. They include those in which another process ran instead of the store, so give the store a
real-time priority (`chrt --fifo 1`). They also depend on the allocator: the embedded store has glibc's, which defers
the work of freeing small pieces to a later allocation; after the requests of a second have ended, a script then takes
10 ms. The official images of Valkey and Redis have jemalloc; --redis-url measures such a store.
"""

import argparse
import asyncio
import hashlib
import logging
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from bench.provenance import provenance
from bench.serving.load_report import tell
from engine_worker.transport.fault_counts import FaultCounts
from engine_worker.transport.presence import Presence
from engine_worker.transport.reaper import Reaper
from pagestream.embedded_store import EmbeddedStore
from shared.fleet_clock import FleetClock
from shared.messages import GenerationRequest, SamplingParams, encode
from shared.new_requests import NewRequest, Share
from shared.reaping import reap_worker
from shared.redis_client import RedisConnections, connect
from shared.redis_keys import INTERACTIVE, RedisKeys
from shared.redis_scripts import Demand, RedisScripts, load_sources
from shared.tasks import cancel_and_wait

STORE_BYTES = 2**31
AT_ONCE = 500
WORKER = "w.1"
DEAD_AFTER_SECONDS = 15
SLOW_MICROSECONDS = 5_000
LIMITS_EXPIRE_SECONDS = 121  # limit.lua
DELETED_AT_ONCE, MAX_SLOW = 10_000, 10_000


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench store-load", description=(__doc__ or "").partition(": ")[2])
    parser.add_argument("--requests", type=int, default=100_000, metavar="N", help="(%(default)s)")
    parser.add_argument("--redis-url", metavar="URL", help="an empty store to use instead of an embedded one")
    parser.add_argument("--json", type=Path, metavar="PATH", help="file for all figures")
    options = parser.parse_args(argv)
    logging.disable(logging.WARNING)  # a line for each request that ends
    url, num_requests = options.redis_url, options.requests
    figures = asyncio.run(_measure(url, num_requests) if url else _measure_embedded(num_requests))
    tell({**provenance(["store-load", *argv]), "requests": options.requests, **figures}, options.json)
    return 0


async def _measure_embedded(num_requests: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="ps-") as directory:
        store = EmbeddedStore.at(Path(directory), STORE_BYTES)
        await store.start()
        try:
            return await _measure(store.url, num_requests)
        finally:
            await store.stop()


async def _measure(redis_url: str, num_requests: int) -> dict[str, Any]:
    connections, keys = connect(redis_url), RedisKeys("m")
    scripts = RedisScripts(connections.commands, keys)
    try:
        redis: Any = connections.commands
        await redis.config_set("slowlog-log-slower-than", SLOW_MICROSECONDS)
        await redis.config_set("slowlog-max-len", MAX_SLOW)
        await redis.slowlog_reset()
        before = await _used_bytes(redis)
        await scripts.register(WORKER)
        for start in range(0, num_requests, AT_ONCE):
            await asyncio.gather(*(_accept(scripts, start + number) for number in range(AT_ONCE)))
            await _claim_all(scripts)
        full = await _used_bytes(redis)
        async with _reaper(connections, keys) as faults:
            started = time.monotonic()
            while faults.num_ended < num_requests:
                await asyncio.sleep(0.5)
            ended_seconds = time.monotonic() - started
        await reap_worker(scripts, WORKER)  # it would have let them go
        slow = _by_script(await redis.slowlog_get(MAX_SLOW))
        await asyncio.sleep(max(0.0, LIMITS_EXPIRE_SECONDS - ended_seconds))
        for pattern in (keys.request("*"), keys.journal("*"), keys.account("*")):
            await _delete(redis, pattern)
        after = await _used_bytes(redis)
    finally:
        await connections.aclose()
    return {
        "seconds until the last has ended": round(ended_seconds, 1),
        "microseconds of scripts over 5 ms": slow,
        "store bytes": {"before": before, "with all": full, "after": after},
    }


async def _accept(scripts: RedisScripts, number: int) -> None:
    request = GenerationRequest(
        request_id=f"{number:032x}", prompt_token_ids=[1] * 100, sampling=SamplingParams(max_tokens=1, seed=0)
    )
    new = NewRequest(request.request_id, encode(request), num_prompt_tokens=100, prefix_key=number.to_bytes(8, "big"))
    key = f"{number:064x}"
    await scripts.limit(
        key, 1.0, requests_per_minute=60, tokens_per_minute=1_000, num_requests=1, num_tokens=0, refuses_debt=True
    )
    await scripts.accept_all([new], gateway_id="gone", priority_class=INTERACTIVE, share=Share(key, max_bytes=2**20))


async def _claim_all(scripts: RedisScripts) -> None:
    while entries := (await scripts.take(WORKER, Demand(64, room=64))).entries:
        await scripts.claim(WORKER, entries)


@asynccontextmanager
async def _reaper(connections: RedisConnections, keys: RedisKeys) -> AsyncIterator[FaultCounts]:
    """Run a worker's ticks and reaper, which observes because no other worker does."""
    presence = Presence(RedisScripts(connections.commands, keys), lambda: WORKER, DEAD_AFTER_SECONDS)
    clock, faults = FleetClock(presence.tick), FaultCounts()
    tasks = [
        asyncio.create_task(part) for part in (clock.run(), Reaper(connections, keys, presence, faults=faults).run())
    ]
    try:
        yield faults
    finally:
        await cancel_and_wait(tasks)


def _by_script(calls: list[dict[str, Any]]) -> dict[str, list[int]]:
    """Return the microseconds of slow scripts by name."""
    names = {hashlib.sha1(text.encode()).hexdigest().encode(): name for name, text in load_sources().items()}
    found: dict[str, list[int]] = {}
    for call in calls:
        words = call["command"].split(b" ", 2)
        if words[0].upper() == b"EVALSHA":
            found.setdefault(names[words[1]], []).append(call["duration"])
    return found


async def _delete(redis: Any, pattern: str) -> None:
    names = [name async for name in redis.scan_iter(match=pattern, count=DELETED_AT_ONCE)]
    for start in range(0, len(names), DELETED_AT_ONCE):
        await redis.unlink(*names[start : start + DELETED_AT_ONCE])


async def _used_bytes(redis: Any) -> int:
    await redis.memory_purge()
    return int((await redis.info("memory"))["used_memory"])
