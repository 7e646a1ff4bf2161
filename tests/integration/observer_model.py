"""A fleet of workers that watch each other, in simulated seconds, with random faults, on a real store.

Built from the product's Presence and Reaper. Faults: workers that end, workers that stop and continue, workers that the
store does not answer, an outage for all, a pause of all, and a store that loses everything. Violations:

    safety      a worker is reaped although it beat in the last `DEAD_AFTER_SECONDS`, and its connections are open
    liveness    a worker that has ended is still there after `MAX_SECONDS` without other faults
"""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from redis.exceptions import ConnectionError

from engine_worker.transport.presence import LEASE_SECONDS, Presence
from engine_worker.transport.reaper import Reaper
from shared.fleet_clock import FleetClock
from shared.redis_client import RedisConnections
from shared.redis_keys import RedisKeys
from shared.redis_scripts import Demand, RedisScripts
from shared.subscription import GAP, Subscription

DEAD_AFTER_SECONDS = 8.0
# Until a new observer may judge: the lease ends, it is steady, its next tick.
MAX_SECONDS = int(LEASE_SECONDS + 2 * DEAD_AFTER_SECONDS + 3)
NUM_WORKERS = 4
MAX_FAULT_SECONDS = int(2 * DEAD_AFTER_SECONDS)


class Violation(AssertionError):
    """The observers broke a promise."""


@dataclass
class Mutation:
    """What differs from the product: nothing, or one rule."""

    lua: Mapping[str, str] | None = None
    presence_class: type[Presence] = Presence


class _Scripts(RedisScripts):
    """Scripts of a worker that the store may not answer."""

    is_cut_off = False

    async def _call(self, *arguments: object) -> object:
        if self.is_cut_off:
            raise ConnectionError("planned")
        return await super()._call(*arguments)  # type: ignore[arg-type]


@dataclass
class Host:
    scripts: _Scripts
    presence: Presence = field(init=False)
    clock: FleetClock = field(init=False)
    reaper: Reaper = field(init=False)
    subscription: Subscription | None = None
    worker_id: str = ""
    beat_at: float = 0.0  # in simulated seconds
    is_stopped: bool = False
    was_reaped: bool = False  # and has not registered again

    @property
    def is_away(self) -> bool:
        return self.is_stopped or self.scripts.is_cut_off


@dataclass
class Site:
    connections: RedisConnections
    keys: RedisKeys
    random: random.Random
    mutation: Mutation = field(default_factory=Mutation)
    now: float = 1_000.0
    hosts: list[Host] = field(default_factory=list)
    num_incarnations: int = 0
    num_reaped: int = 0

    async def start_worker(self) -> None:
        host = Host(_Scripts(self.connections.commands, self.keys, self.mutation.lua))
        host.presence = self.mutation.presence_class(
            host.scripts, lambda: host.worker_id, DEAD_AFTER_SECONDS, lambda: self.now
        )
        host.clock = FleetClock(host.presence.tick, lambda: self.now)
        host.reaper = Reaper(self.connections, self.keys, host.presence, clock=lambda: self.now)
        await self._register(host)
        self.hosts.append(host)

    async def _register(self, host: Host) -> None:
        """Begin an incarnation, which never has the id of an earlier one."""
        self.num_incarnations += 1
        host.worker_id, host.was_reaped, host.beat_at = f"w.{self.num_incarnations}", False, self.now
        await host.scripts.register(host.worker_id)
        await host.scripts.take(host.worker_id, Demand(1))  # a consumer exists from its first read on
        if host.subscription is not None:
            await host.subscription.aclose()
        channel = self.keys.control_channel(host.worker_id)
        host.subscription = Subscription(self.connections.subscriber, [channel], ping_seconds=3_600)
        assert await host.subscription.get(5.0) is GAP

    async def end_worker(self, host: Host) -> str:
        self.hosts.remove(host)
        assert host.subscription is not None
        await host.subscription.aclose()
        return host.worker_id

    async def lose_everything(self) -> None:
        await self.connections.commands.flushdb()
        for host in self.hosts:
            host.was_reaped = True

    async def pass_second(self) -> None:
        """All workers tick and look, in any order of both."""
        self.now += 1
        steps: list[tuple[Host, Callable[[Host], object]]] = []
        for host in self.hosts:
            if host.was_reaped and not host.is_away:
                await self._register(host)
            if not host.is_stopped:
                steps += [(host, self._tick), (host, self._look)]
        self.random.shuffle(steps)
        for host, step in steps:
            await step(host)  # type: ignore[misc]
        await self._check_safety()

    async def _tick(self, host: Host) -> None:
        try:
            await host.clock.tick()
            if not await self.is_gone(host.worker_id):  # else it was reaped earlier in this second
                host.beat_at = self.now
        except ConnectionError:
            pass

    async def _look(self, host: Host) -> None:
        await host.reaper.tick(could_hear=True)  # workers without a beat are silent, as no one sends heartbeats

    async def _check_safety(self) -> None:
        for host in self.hosts:
            if host.was_reaped or not await self.is_gone(host.worker_id):
                continue
            self.num_reaped += 1
            host.was_reaped = True
            silent_seconds = self.now - host.beat_at
            if silent_seconds < DEAD_AFTER_SECONDS - 1:
                raise Violation(f"safety: {host.worker_id} was reaped after {silent_seconds} s")

    async def is_gone(self, worker_id: str) -> bool:
        return not await self.connections.commands.exists(self.keys.fence(worker_id))


async def run_site(connections: RedisConnections, keys: RedisKeys, seed: int, mutation: Mutation, rounds: int) -> int:
    """Run random faults and return how many workers were reaped although they lived, after a long silence."""
    site = Site(connections, keys, random.Random(seed), mutation)
    for _ in range(NUM_WORKERS):
        await site.start_worker()
    try:
        for _ in range(rounds):
            await _one_fault(site)
            await _one_death(site)
    finally:
        for host in list(site.hosts):
            await site.end_worker(host)
    return site.num_reaped


async def _one_death(site: Site) -> None:
    host = site.random.choice(site.hosts)
    if site.random.random() < 0.5:  # the observer, if there is one
        host = next((each for each in site.hosts if each.presence.is_observer), host)
    ended = await site.end_worker(host)
    await site.start_worker()
    for _ in range(MAX_SECONDS):
        await site.pass_second()
        if await site.is_gone(ended):
            return
    raise Violation(f"liveness: {ended} has ended and was not reaped")


async def _one_fault(site: Site) -> None:
    seconds = site.random.randrange(1, MAX_FAULT_SECONDS)
    chosen = site.random.sample(site.hosts, site.random.randint(1, NUM_WORKERS))
    match site.random.choice(["stop", "cut off", "pause of all", "loss", "none"]):
        case "stop":
            for host in chosen:
                host.is_stopped = True
        case "cut off":
            for host in chosen:
                host.scripts.is_cut_off = True
        case "pause of all":
            site.now += seconds
        case "loss":
            await site.lose_everything()
    for _ in range(seconds):
        await site.pass_second()
    for host in site.hosts:
        host.is_stopped = host.scripts.is_cut_off = False
