"""A clock that several processes count together, each by its own monotonic clock."""

import pytest

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
    return [FleetClock(scripts, own) for own in monotonic]


async def test_all_agree_whatever_their_own_clocks_say(clocks, monotonic):
    monotonic[0].now += 100
    await clocks[0].tick()
    await clocks[1].tick()
    assert [clock.now() for clock in clocks] == [100.0, 100.0]
    for own in monotonic:
        own.now += 7.25
    await clocks[1].tick()
    assert [clock.now() for clock in clocks] == [107.25, 107.25]


async def test_it_is_never_ahead_of_the_time_that_passed_and_never_goes_back(clocks, monotonic):
    for step in range(20):
        for own in monotonic:
            own.now += 1.0
        await clocks[step % 2].tick()
    assert clocks[0].now() == clocks[1].now() == 20.0
    monotonic[0].now += 1.0
    await clocks[1].tick()  # it did not count that second
    assert (clocks[0].now(), clocks[1].now()) == (21.0, 20.0)
    await clocks[0].tick()
    await clocks[1].tick()
    assert clocks[1].now() == 21.0


async def test_a_store_that_lost_its_memory_learns_it_again(clocks, monotonic, connections):
    monotonic[0].now += 100
    await clocks[0].tick()
    await connections.commands.flushall()
    newcomer = clocks[1]
    await newcomer.tick()
    assert newcomer.now() == 0.0
    await clocks[0].tick()
    await newcomer.tick()
    assert newcomer.now() == 100.0


async def test_the_wall_clock_of_the_store_has_no_part_in_it(clocks, monotonic, connections, keys):
    await clocks[0].tick()
    monotonic[0].now += 3
    await clocks[0].tick()
    assert await connections.commands.get(keys.clock) == b"3000"
    assert await connections.commands.ttl(keys.clock) == -1
