"""The cost of a TAKE to the store, by its own statistics, for numbers of peers and entries."""

from typing import Any

from redis.asyncio import Redis

from shared.redis_keys import RedisKeys
from shared.redis_scripts import Demand, RedisScripts

WORKER = "w0.0"
CALLS, ROUNDS = 100, 5


async def take_costs(redis: Redis, keys: RedisKeys) -> dict[str, float]:
    """Return microseconds of server time per call, in the best round, because other processes only add time."""
    return {
        f"{num_peers} peers, {num_entries} entries": await _best_of(redis, keys, num_peers, num_entries)
        for num_peers in (0, 256)
        for num_entries in (0, 8)
    }


async def _best_of(redis: Redis, keys: RedisKeys, num_peers: int, num_entries: int) -> float:
    scripts = RedisScripts(redis, keys)
    costs = []
    for _ in range(ROUNDS):
        await redis.flushall()
        await scripts.register(WORKER)
        for held in keys.held if num_peers else ():
            await redis.zadd(held, {f"w{number}.x": 1_000_000 + number for number in range(1, 1 + num_peers)})
        async with redis.pipeline(transaction=False) as pipeline:
            for number in range(CALLS * num_entries):
                pipeline.xadd(keys.queue("interactive"), {"r": f"{number:032x}", "s": "0"})
            await pipeline.execute()
        await scripts.take(WORKER, Demand(0))  # loads the script
        await redis.config_resetstat()
        for _ in range(CALLS):
            await scripts.take(WORKER, Demand(max(1, num_entries), room=64, prompt_tokens=100_000))
        stats: Any = await redis.info("commandstats")
        costs.append(stats["cmdstat_evalsha"]["usec_per_call"])
    return min(costs)
