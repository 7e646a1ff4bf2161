"""Counters of a worker's transport are in its metrics."""

import asyncio
import urllib.request
from collections.abc import Awaitable, Callable

from bench.serving.free_port import free_port
from shared.redis_scripts import RedisScripts
from tests.e2e.fleet import START_SECONDS
from tests.faults.conftest import World
from tests.patience import PATIENCE_SECONDS


async def test_metrics_count_reaped_workers_and_unreadable_requests(
    start_world: Callable[..., Awaitable[World]],
) -> None:
    world, port = await start_world(), free_port()
    await RedisScripts(world.connections.commands, world.keys).register("w0.never-beats")
    world.start_worker("w1", "--dead-after", "3", "--metrics-port", str(port))
    async with asyncio.timeout(START_SECONDS):
        # A worker listens while one that is registered has not beaten: until it reaps that one.
        while "reaped worker w0" not in world.fleet.log("w1"):
            await world.connections.commands.publish(world.keys.heartbeat_channel, b"no frame")
            await asyncio.sleep(0.05)
    assert await counted(port, "bad_heartbeats") > 0
    assert await counted(port, "workers_reaped") == 1
    for name in ("orphaned_requests", "heartbeat_failures", "queue_read_failures", "store_retries"):
        assert await counted(port, name) == 0


async def counted(port: int, name: str) -> float:
    def scrape() -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=PATIENCE_SECONDS) as reply:
            return reply.read().decode()

    text = await asyncio.to_thread(scrape)
    (sample,) = [line for line in text.splitlines() if line.startswith(f"pagestream_{name}_total{{")]
    return float(sample.rsplit(" ", 1)[1])
