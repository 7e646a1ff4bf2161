"""The fleet clock: several processes advance it together, each by its own monotonic clock."""

import asyncio

import pytest
from redis.exceptions import ConnectionError, ResponseError

from shared.fleet_clock import FleetClock
from shared.redis_scripts import RedisScripts


class Monotonic:
    def __init__(self, now: float) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def monotonic() -> list[Monotonic]:
    return [Monotonic(50.0), Monotonic(9000.0)]


@pytest.fixture
def clocks(scripts: RedisScripts, monotonic: list[Monotonic]) -> list[FleetClock]:
    return [FleetClock(scripts.tick, own) for own in monotonic]


async def test_fleet_clock_all_processes_agree(clocks, monotonic):
    monotonic[0].now += 100
    await clocks[0].tick()
    await clocks[1].tick()
    assert [clock.now() for clock in clocks] == [100.0, 100.0]
    for own in monotonic:
        own.now += 7.25
    await clocks[1].tick()
    assert [clock.now() for clock in clocks] == [107.25, 107.25]


async def test_fleet_clock_is_monotonic_and_never_ahead(clocks, monotonic):
    for step in range(20):
        for own in monotonic:
            own.now += 1.0
        await clocks[step % 2].tick()
    assert clocks[0].now() == clocks[1].now() == 20.0
    monotonic[0].now += 1.0
    await clocks[1].tick()  # this process did not count that second
    assert (clocks[0].now(), clocks[1].now()) == (21.0, 20.0)
    await clocks[0].tick()
    await clocks[1].tick()
    assert clocks[1].now() == 21.0


async def test_fleet_clock_is_restored_after_store_loss(clocks, monotonic, connections):
    monotonic[0].now += 100
    await clocks[0].tick()
    await connections.commands.flushall()
    newcomer = clocks[1]
    await newcomer.tick()
    assert newcomer.now() == 0.0
    await clocks[0].tick()
    await newcomer.tick()
    assert newcomer.now() == 100.0


async def test_fleet_clock_ignores_wall_clock_of_store(clocks, monotonic, connections, keys):
    await clocks[0].tick()
    monotonic[0].now += 3
    await clocks[0].tick()
    assert await connections.commands.get(keys.clock) == b"3000"
    assert await connections.commands.ttl(keys.clock) == -1


@pytest.mark.parametrize(("error", "is_reply"), [(ConnectionError("closed"), False), (ResponseError("OOM full"), True)])
async def test_fleet_clock_knows_how_long_the_store_is_silent(error, is_reply):
    own = Monotonic(50.0)
    has_asked = asyncio.Event()

    async def tick(_now: float) -> float:
        own.now += 12
        has_asked.set()
        raise error

    clock = FleetClock(tick, own)
    running = asyncio.create_task(clock.run())
    await has_asked.wait()
    await asyncio.sleep(0)  # the task handles the error
    assert clock.silent_seconds() == (0 if is_reply else 12)
    running.cancel()
