"""python -m bench take-cost: server time of TAKE and ACCEPT, as counted by the store.

TAKE with 0 and 256 peers without fair queueing, and with 20,000 waiting requests of 100 keys; ACCEPT of one request
into that queue, and of one that wakes its home among 256 idle workers. Each value is the minimum of the rounds, because
other programs can only add to it.
"""

import argparse
import asyncio
import hashlib
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from redis.asyncio import Redis

from bench.provenance import provenance
from bench.serving.load_report import tell
from pagestream.embedded_store import EmbeddedStore
from shared.new_requests import NewRequest, Share
from shared.redis_client import connect
from shared.redis_keys import RedisKeys
from shared.redis_scripts import Demand, RedisScripts

WORKER = "w0.0"
CALLS, ROUNDS = 400, 5
NUM_KEYS, NUM_WAITING, BODY_REQUESTS = 100, 20_000, 100
STORE_BYTES = 2**30


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench take-cost", description=(__doc__ or "").partition(": ")[2])
    parser.add_argument("--json", type=Path, metavar="PATH", help="file for all figures")
    options = parser.parse_args(argv)
    tell({**provenance(["take-cost", *argv]), **asyncio.run(_measure())}, options.json)
    return 0


async def _measure() -> dict[str, dict[str, float]]:
    with tempfile.TemporaryDirectory(prefix="ps-") as directory:
        store = EmbeddedStore.at(Path(directory), STORE_BYTES)
        await store.start()
        connections, keys = connect(store.url), RedisKeys("m")
        try:
            redis = connections.commands
            costs = await take_costs(redis, keys) | await turn_costs(redis, keys) | await wake_costs(redis, keys)
            return {"microseconds": costs}
        finally:
            await connections.aclose()
            await store.stop()


async def take_costs(redis: Redis, keys: RedisKeys) -> dict[str, float]:
    """Return microseconds per TAKE without fair queueing."""
    scripts, costs = RedisScripts(redis, keys), {}
    for num_peers in (0, 256):
        for num_entries in (0, 8):

            async def fill(num_peers: int = num_peers, num_entries: int = num_entries) -> None:
                for held in keys.held if num_peers else ():
                    await redis.zadd(held, {f"w{number}.x": 1_000_000 + number for number in range(1, 1 + num_peers)})
                async with redis.pipeline(transaction=False) as pipeline:
                    for number in range(CALLS * num_entries):
                        pipeline.xadd(keys.queue("interactive"), {"r": f"{number:032x}", "s": "0"})
                    await pipeline.execute()

            async def take(_: int, count: int = max(1, num_entries)) -> None:
                await scripts.take(WORKER, Demand(count, room=64, prompt_tokens=100_000))

            costs[f"{num_peers} peers, {num_entries} entries"] = await _best_of(scripts, fill, take)
    return costs


async def turn_costs(redis: Redis, keys: RedisKeys) -> dict[str, float]:
    """Return microseconds per TAKE of 8 and per ACCEPT with waiting requests of many keys."""
    scripts = RedisScripts(redis, keys)

    async def accept(count: int, key: int, name: str) -> None:
        requests = [NewRequest(f"{name}-{number}", b"body", num_prompt_tokens=100) for number in range(count)]
        share = Share(hashlib.sha256(str(key).encode()).hexdigest())
        await scripts.accept_all(requests, gateway_id="g", priority_class="interactive", max_queued=10**6, share=share)

    async def fill() -> None:
        for number in range(NUM_WAITING // BODY_REQUESTS):
            await accept(BODY_REQUESTS, number % NUM_KEYS, f"waiting{number}")

    async def take(_: int) -> None:
        assert len((await scripts.take(WORKER, Demand(8, room=64))).entries) == 8

    return {
        "TAKE of 8 in turns": await _best_of(scripts, fill, take),
        "ACCEPT of 1": await _best_of(scripts, fill, lambda number: accept(1, number % NUM_KEYS, f"new{number}")),
    }


async def wake_costs(redis: Redis, keys: RedisKeys) -> dict[str, float]:
    """Return microseconds per ACCEPT of a request whose home is one of 256 workers that wait for messages."""
    scripts, prefix = RedisScripts(redis, keys), b"p" * 8

    async def accept(number: int) -> None:
        new = NewRequest(str(number), b"body", num_prompt_tokens=100, prefix_key=prefix)
        await scripts.accept_all([new], gateway_id="g", priority_class="interactive", share=Share(""))

    async def fill() -> None:
        await accept(CALLS)
        await scripts.take(WORKER, Demand(1, room=64))
        await redis.zadd(keys.held[0], {f"w{number}.x": 0 for number in range(256)})

    return {"ACCEPT of 1 that wakes its home, 256 idle workers": await _best_of(scripts, fill, accept)}


async def _best_of(
    scripts: RedisScripts, fill: Callable[[], Awaitable[None]], call: Callable[[int], Awaitable[None]]
) -> float:
    costs = []
    for _ in range(ROUNDS):
        await scripts.redis.flushall()
        await scripts.register(WORKER)
        await fill()
        await scripts.take(WORKER, Demand(0))  # loads the script
        await scripts.redis.config_resetstat()
        for number in range(CALLS):
            await call(number)
        stats: Any = await scripts.redis.info("commandstats")
        costs.append(stats["cmdstat_evalsha"]["usec_per_call"])
    return min(costs)
