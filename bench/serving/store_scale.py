"""python -m bench store-scale: the store's processor time for the upkeep of idle workers, and its cost per ACCEPT.

Each worker runs the parts of a worker that has nothing to do: beats, heartbeats, the search for dead workers, its
control messages, and its wait for entries. Eight gateways listen to heartbeats and tick. The figures are the store's
own counts, over a time in which one worker observes.
"""

import argparse
import asyncio
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from bench.provenance import provenance
from bench.serving.load_report import tell
from engine_worker.transport.control_messages import ControlMessages
from engine_worker.transport.heartbeat import HeartbeatPublisher
from engine_worker.transport.incarnation import Incarnation, register
from engine_worker.transport.presence import Presence
from engine_worker.transport.reaper import Reaper
from engine_worker.transport.worker_profile import WorkerProfile
from pagestream.embedded_store import EmbeddedStore
from shared.fleet_clock import FleetClock
from shared.messages import GenerationRequest, SamplingParams, WorkerHeartbeat, WorkerPhase, encode
from shared.new_requests import NewRequest, Share
from shared.redis_client import connect
from shared.redis_keys import RedisKeys
from shared.redis_scripts import Demand, RedisScripts
from shared.subscription import Subscription
from shared.tasks import cancel_and_wait
from shared.ticks import next_tick

NUM_GATEWAYS = 8
DEAD_AFTER_SECONDS = 15
STORE_BYTES = 2**30
NUM_ACCEPTS = 200
SETTLE_SECONDS = DEAD_AFTER_SECONDS + 8  # until a worker observes


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench store-scale", description=(__doc__ or "").partition(": ")[2])
    parser.add_argument("--workers", type=int, nargs="+", default=[16, 64, 256, 1000], metavar="N")
    parser.add_argument("--seconds", type=float, default=20.0, help="measured time of each number (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="file for all figures")
    options = parser.parse_args(argv)
    figures = {str(count): asyncio.run(_measure(count, options.seconds)) for count in options.workers}
    tell({**provenance(["store-scale", *argv]), "workers": figures}, options.json)
    return 0


async def _measure(num_workers: int, seconds: float) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="ps-") as directory:
        store, keys = EmbeddedStore.at(Path(directory), STORE_BYTES), RedisKeys("m")
        await store.start()
        try:
            async with AsyncExitStack() as fleet:
                workers = [IdleWorker(store.url, keys, number) for number in range(num_workers)]
                for worker in workers:
                    await worker.start()
                    fleet.push_async_callback(worker.stop)
                for _ in range(NUM_GATEWAYS):
                    await fleet.enter_async_context(_listening_gateway(store.url, keys))
                await asyncio.sleep(SETTLE_SECONDS)
                figures = await _upkeep(store.url, keys, seconds)
                figures["observers"] = sum(worker.presence.is_observer for worker in workers)
                return figures
        finally:
            await store.stop()


class IdleWorker:
    """The parts of a worker that speak with the store while it has no request."""

    def __init__(self, url: str, keys: RedisKeys, number: int) -> None:
        self._connections, self._keys = connect(url), keys
        self._base_id = f"w{number}"
        self._scripts = RedisScripts(self._connections.commands, keys)
        self._incarnation: Incarnation | None = None
        self.presence = Presence(self._scripts, self._incarnation_id, DEAD_AFTER_SECONDS)
        self._tasks: list[asyncio.Task[None]] = []

    def _incarnation_id(self) -> str:
        return "" if self._incarnation is None else self._incarnation.worker_id

    async def start(self) -> None:
        clock = FleetClock(self.presence.tick)
        profile = WorkerProfile(has_peers=lambda: self.presence.has_peers)
        self._incarnation = found = await register(
            self._connections, self._keys, self._base_id, fleet_clock=clock, profile=profile
        )
        heartbeats = HeartbeatPublisher(self._connections.commands, self._keys)
        control = ControlMessages(
            self._connections.subscriber, self._keys, lambda _: None, on_wake=found.requests.wakes.wake
        )
        found.requests.wakes.wake()  # gateways send messages
        parts = clock.run(), heartbeats.run(), control.run(found.worker_id), self._claim(found), self._beat(heartbeats)
        reaper = Reaper(self._connections, self._keys, self.presence)
        self._tasks = [asyncio.create_task(part) for part in (*parts, reaper.run())]

    async def stop(self) -> None:
        await cancel_and_wait(self._tasks)
        await self._connections.aclose()

    async def _claim(self, incarnation: Incarnation) -> None:
        while True:
            await incarnation.requests.claim(Demand(8, room=64), block=True)

    async def _beat(self, heartbeats: HeartbeatPublisher) -> None:
        while True:
            heartbeats.set_latest(WorkerHeartbeat(worker_id=self._incarnation_id(), phase=WorkerPhase.READY))
            await next_tick(1.0)


class _listening_gateway:
    """A gateway's subscription to heartbeats, and its ticks."""

    def __init__(self, url: str, keys: RedisKeys) -> None:
        self._connections, self._keys = connect(url), keys

    async def __aenter__(self) -> None:
        clock = FleetClock(RedisScripts(self._connections.commands, self._keys).tick)
        self._tasks = [asyncio.create_task(clock.run()), asyncio.create_task(self._listen())]

    async def __aexit__(self, *_: object) -> None:
        await cancel_and_wait(self._tasks)
        await self._connections.aclose()

    async def _listen(self) -> None:
        subscription = Subscription(self._connections.subscriber, [self._keys.heartbeat_channel])
        while True:
            await subscription.get(1.0)


async def _upkeep(url: str, keys: RedisKeys, seconds: float) -> dict[str, float]:
    """Return shares of one core, and microseconds of the store's time per call."""
    connections = connect(url)
    try:
        redis = connections.commands
        await redis.config_resetstat()
        before, started = await _processor_seconds(redis), time.monotonic()
        await asyncio.sleep(seconds)
        share = (await _processor_seconds(redis) - before) / (time.monotonic() - started)
        stats: Any = await redis.info("commandstats")
        scripts = stats["cmdstat_evalsha"]
        upkeep = {
            "share of a core": round(share, 4),
            "scripts per second": round(scripts["calls"] / seconds, 1),
            "microseconds per script": scripts["usec_per_call"],
            "heartbeats per second": round(stats["cmdstat_publish"]["calls"] / seconds, 1),
        }
        return upkeep | {"microseconds per ACCEPT": await _accept_cost(RedisScripts(redis, keys))}
    finally:
        await connections.aclose()


async def _processor_seconds(redis: Any) -> float:
    used = await redis.info("cpu")
    return float(used["used_cpu_user"]) + float(used["used_cpu_sys"])


async def _accept_cost(scripts: RedisScripts) -> float:
    """Return the store's time per ACCEPT in microseconds, by the store's slow log, in which each call is listed."""
    await scripts.redis.config_set("slowlog-log-slower-than", 0)
    await scripts.redis.config_set("slowlog-max-len", 100_000)
    costs = []
    for number in range(NUM_ACCEPTS):
        name = f"accept-{number}"
        body = encode(
            GenerationRequest(
                request_id=name, prompt_token_ids=[1] * 100, sampling=SamplingParams(max_tokens=1, seed=0)
            )
        )
        new = NewRequest(name, body, num_prompt_tokens=100, prefix_key=name.encode()[-8:])
        await scripts.accept_all([new], gateway_id="g", priority_class="interactive", share=Share(""))
        found: Any = await scripts.redis.slowlog_get(256)
        costs += [call["duration"] for call in found if name.encode() in call["command"]][:1]
        await scripts.redis.slowlog_reset()
    return sorted(costs)[len(costs) // 2]
