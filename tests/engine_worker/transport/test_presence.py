"""Beats and the observer: who may observe, how the lease passes on, and which pauses and losses stop everyone."""

from dataclasses import dataclass, field

import pytest
from redis.exceptions import ConnectionError

from engine_worker.transport.presence import LEASE_SECONDS, Presence
from shared.fleet_clock import FleetClock
from shared.live_workers import LiveWorkers
from shared.redis_client import connect
from shared.redis_scripts import RedisScripts
from tests.engine_worker.transport.rig import FlakyScripts

DEAD_AFTER_SECONDS = 15.0


@dataclass
class Host:
    """A worker with its own monotonic clock."""

    scripts: RedisScripts
    worker_id: str
    now: float = 500.0
    presence: Presence = field(init=False)
    fleet_clock: FleetClock = field(init=False)

    def __post_init__(self) -> None:
        self.presence = Presence(self.scripts, lambda: self.worker_id, DEAD_AFTER_SECONDS, lambda: self.now)
        self.fleet_clock = FleetClock(self.presence.tick, lambda: self.now)


@pytest.fixture
def hosts(scripts: RedisScripts) -> list[Host]:
    return [Host(scripts, "w0.a"), Host(scripts, "w1.b", now=9_000.0)]


async def pass_seconds(hosts: list[Host], count: int, ticking: list[Host] | None = None) -> None:
    for _ in range(count):
        for host in hosts:
            host.now += 1
        for host in ticking if ticking is not None else hosts:
            await host.fleet_clock.tick()


def observers(hosts: list[Host]) -> list[str]:
    return [host.worker_id for host in hosts if host.presence.is_observer]


def judges(hosts: list[Host]) -> list[str]:
    """Return the workers that may find others dead."""
    return [host.worker_id for host in hosts if host.presence.is_observer and host.presence.is_steady]


async def test_one_worker_observes_and_judges_once_it_is_steady(hosts: list[Host]) -> None:
    await pass_seconds(hosts, int(DEAD_AFTER_SECONDS))
    assert observers(hosts) == ["w0.a"] and judges(hosts) == []
    for _ in range(30):
        await pass_seconds(hosts, 1)
        assert observers(hosts) == ["w0.a"]
    assert judges(hosts) == ["w0.a"]


async def test_steady_worker_takes_the_lease_from_a_new_one(hosts: list[Host]) -> None:
    await pass_seconds(hosts, 1, [hosts[0]])
    await pass_seconds(hosts, 20, [hosts[1]])
    await pass_seconds(hosts, 1)  # the first one has paused
    assert judges(hosts) == ["w1.b"]
    await pass_seconds(hosts, 20)
    assert judges(hosts) == ["w1.b"]


async def test_successor_observes_when_the_lease_has_ended(hosts: list[Host]) -> None:
    await pass_seconds(hosts, 20)
    await pass_seconds(hosts, int(LEASE_SECONDS), [hosts[1]])
    assert not hosts[1].presence.is_observer
    await pass_seconds(hosts, 1, [hosts[1]])
    assert hosts[1].presence.is_observer
    await hosts[0].fleet_clock.tick()  # it returns: it has paused, and the lease is another's
    assert observers(hosts) == ["w1.b"] == judges(hosts)


async def test_no_one_judges_after_a_pause_of_all(hosts: list[Host]) -> None:
    await pass_seconds(hosts, 20)
    for host in hosts:
        host.now += 60
    await pass_seconds(hosts, int(DEAD_AFTER_SECONDS))
    assert judges(hosts) == []
    await pass_seconds(hosts, 5)
    assert len(judges(hosts)) == 1


async def test_no_one_judges_after_a_jump_of_the_fleet_clock(hosts: list[Host], scripts: RedisScripts) -> None:
    await pass_seconds(hosts, 20)
    await scripts.tick(hosts[0].fleet_clock.now() + 3_600)  # a host whose clock is wrong
    await pass_seconds(hosts, 1)
    assert judges(hosts) == []


@pytest.mark.parametrize("event", ["outage", "wipe"])
async def test_no_one_judges_after_the_store_was_away(connections, keys, event: str) -> None:
    scripts = FlakyScripts(connections.commands, keys)
    host = Host(scripts, "w0.a")
    await pass_seconds([host], 20)
    assert judges([host]) == ["w0.a"]
    if event == "outage":
        scripts.fail("tick", "refuse")
        with pytest.raises(ConnectionError):
            await host.fleet_clock.tick()
        await pass_seconds([host], 1)
    else:
        await connections.commands.flushall()
        other = Host(scripts, "w1.b")  # its count is lower, so the fleet clock goes back
        await other.fleet_clock.tick()
        host.presence.fleet_seconds += 10
        await pass_seconds([host], 1)
    assert judges([host]) == []


async def test_unregistered_worker_does_not_beat(scripts: RedisScripts) -> None:
    host = Host(scripts, "")
    await pass_seconds([host], 30)
    assert await scripts.beats() == {} and not host.presence.is_observer


async def test_worker_learns_whether_others_beat(hosts: list[Host]) -> None:
    await hosts[0].fleet_clock.tick()
    assert not hosts[0].presence.has_peers
    await hosts[1].fleet_clock.tick()
    assert hosts[1].presence.has_peers


async def test_beats_are_written_to_a_full_store(hosts: list[Host], connections, keys) -> None:
    redis = connections.commands
    limit = (await redis.config_get("maxmemory"))["maxmemory"]
    await redis.config_set("maxmemory", "1mb")
    try:
        with pytest.raises(Exception, match="maxmemory"):
            await redis.set(keys.write_probe, b"1")
        await hosts[0].fleet_clock.tick()
    finally:
        await redis.config_set("maxmemory", limit)
    assert await hosts[0].scripts.beats() == {"w0.a": 0.0}


async def test_no_worker_is_known_to_live_without_the_store(keys, tmp_path) -> None:
    """A worker that starts during an outage waits; the error must not end it."""
    away = connect(f"unix://{tmp_path}/no-server")
    try:
        assert await LiveWorkers(RedisScripts(away.commands, keys)).ids() == set()
    finally:
        await away.aclose()


async def test_live_workers_are_those_that_beat_again(hosts: list[Host], scripts: RedisScripts) -> None:
    await pass_seconds(hosts, 1)
    watch = LiveWorkers(scripts)
    assert await watch.ids() == set()
    await pass_seconds(hosts, 1, [hosts[1]])
    assert await watch.ids() == {"w1.b"}
