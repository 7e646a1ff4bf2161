"""Processes die or are paused, as by garbage collection, swapping or the migration of a virtual machine.

--dead-after scales the limits down from 15 s, so that a pause of seconds exceeds them.
"""

import asyncio
import signal
import time

import pytest

from tests.e2e.reader import Reader
from tests.faults.conftest import StartWorld, Store, World

STEPS = ("--script-step-seconds", "0.02")
# Three ticks, one more until the counting tick begins, and the round trip: at most 5 s on an idle machine. Unscaled
# ticks of 15 s would take 25 s there.
LONGEST_SILENCE_SECONDS = 20.0


async def on_first_of_two(start_world: StartWorld, *flags: str, max_tokens: int = 300) -> tuple[World, list[Reader]]:
    """Return four streams that run on w0 when w1 joins."""
    world = await start_world()
    world.start_worker("w0", *STEPS, *flags)
    readers = world.read(4, max_tokens=max_tokens)
    await world.all_have(readers, 5)
    world.start_worker("w1", *STEPS, *flags)
    await world.has_ready("w0", "w1")
    return world, readers


def say_silence(readers: list[Reader]) -> None:
    silence_seconds = max(reader.longest_silence_seconds for reader in readers)
    print(f"longest silence: {silence_seconds:.1f} s")
    assert silence_seconds < LONGEST_SILENCE_SECONDS


async def test_killed_unsupervised_worker_is_taken_over(start_world: StartWorld) -> None:
    world, readers = await on_first_of_two(start_world, "--dead-after", "3")
    world.fleet.processes["w0"].kill()
    await world.all_complete(readers)
    assert await world.attempts(readers) == [2] * len(readers)
    say_silence(readers)
    await world.nothing_is_left()


@pytest.mark.long  # a worker judges others after 15 s
async def test_killed_worker_is_taken_over_before_the_default_limit(start_world: StartWorld) -> None:
    """The kernel closes its connections, so no one has to wait for 15 s of silence."""
    world = await start_world()
    for name in ("w0", "w1"):
        world.start_worker(name, *STEPS)
    await world.has_ready("w0", "w1")
    await asyncio.sleep(16.0)  # until both may judge
    readers = world.read(8, max_tokens=300)
    await world.all_have(readers, 5)
    world.fleet.processes["w0"].kill()
    await world.all_complete(readers)
    silence_seconds = max(reader.longest_silence_seconds for reader in readers)
    print(f"longest silence: {silence_seconds:.1f} s")
    assert silence_seconds < 8.0  # 5 s on an idle machine
    await world.nothing_is_left()


async def test_worker_paused_past_the_limit_is_fenced_and_serves_again(start_world: StartWorld) -> None:
    """No token of its step in flight reaches a client, because each would be doubled."""
    world, readers = await on_first_of_two(start_world, "--dead-after", "3")
    zombie = world.fleet.processes["w0"]
    zombie.send_signal(signal.SIGSTOP)
    await world.all_complete(readers)
    assert await world.attempts(readers) == [2] * len(readers)
    say_silence(readers)
    zombie.send_signal(signal.SIGCONT)
    await world.logged("w0", "fenced; dropped 4 requests")
    await world.logged("w0", "serving as w0.", times=2)  # a new id, because the old one is never used again
    world.fleet.processes["w1"].terminate()
    later = world.read(2, max_tokens=50)
    await world.all_complete(later)
    await world.nothing_is_left()


async def test_worker_paused_under_the_limit_is_not_reaped(start_world: StartWorld) -> None:
    """The pause is half of the limit, as 8 s are of 15 s."""
    world, readers = await on_first_of_two(start_world, "--dead-after", "8")
    world.fleet.processes["w0"].send_signal(signal.SIGSTOP)
    await asyncio.sleep(4.0)  # length of the fault
    world.fleet.processes["w0"].send_signal(signal.SIGCONT)
    await world.all_complete(readers)
    assert await world.attempts(readers) == [1] * len(readers)
    assert "reaped" not in world.fleet.all_logs()


@pytest.mark.long  # several times the time after which a worker without connections is dead
async def test_worker_whose_subscriptions_are_cut_is_not_reaped(start_world: StartWorld, store: Store) -> None:
    """Only a worker that neither beats nor listens is dead."""
    world, readers = await on_first_of_two(start_world, "--dead-after", "3", max_tokens=900)
    until = time.monotonic() + 12.0
    with store.client() as client:
        while time.monotonic() < until:
            client.client_kill_filter(_type="pubsub")
            await asyncio.sleep(0.2)  # interval between faults
    await world.all_complete(readers)
    assert await world.attempts(readers) == [1] * len(readers)
    assert "reaped" not in world.fleet.all_logs()


async def test_paused_observer_reaps_no_worker(start_world: StartWorld) -> None:
    """It has missed twice as many heartbeats as a death requires, within one tick of its own clock."""
    world, readers = await on_first_of_two(start_world, "--dead-after", "3", max_tokens=550)
    world.fleet.processes["w1"].send_signal(signal.SIGSTOP)
    await world.logged("w0", "reaped worker w1.")  # as a worker, the observer is missed itself
    await asyncio.sleep(3)  # the fault continues
    world.fleet.processes["w1"].send_signal(signal.SIGCONT)
    await world.logged("w1", "serving as w1.", times=2)
    await world.all_complete(readers)
    assert await world.attempts(readers) == [1] * len(readers)
    assert "reaped worker w0." not in world.fleet.log("w1")


@pytest.mark.long  # workers judge others after 8 s
@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
async def test_death_is_seen_although_the_observer_ends_with_it(start_world: StartWorld, fault: signal.Signals) -> None:
    """A stopped worker keeps its connections, so only its silence shows that it is dead."""
    dead_after_seconds = 8.0
    world = await start_world()
    names = {"w0", "w1", "w2"}
    for name in sorted(names):
        world.start_worker(name, *STEPS, "--dead-after", f"{dead_after_seconds:g}")
    await world.has_ready(*names)
    await asyncio.sleep(dead_after_seconds + 2.0)  # until all may judge
    readers = world.read(12, max_tokens=300)
    await world.all_have(readers, 5)
    observer = await world.observer()
    dead, survivor = sorted(names - {observer})
    world.fleet.processes[dead].send_signal(signal.SIGSTOP)
    world.fleet.processes[observer].send_signal(fault)
    stopped_at = time.monotonic()
    await world.logged(survivor, f"reaped worker {dead}.")
    seconds = time.monotonic() - stopped_at
    print(f"seen after {seconds:.1f} s")
    assert seconds <= dead_after_seconds + 2.0
    await world.all_complete(readers)
    await world.nothing_is_left()


async def test_new_worker_drains_the_queue_of_dead_ones(start_world: StartWorld) -> None:
    """The queue drains, begun requests first; no request is given up, and none is computed more than twice."""
    world = await start_world()
    names = ["w0", "w1", "w2"]
    for name in names:
        world.start_worker(name, *STEPS, "--dead-after", "3")
    await world.has_ready(*names)
    readers = world.read(60, max_tokens=120)
    await world.all_have(readers[:10], 5)
    for name in names:
        world.fleet.processes[name].kill()
    world.start_worker("w3", "--dead-after", "3")
    await world.all_complete(readers)
    assert max(await world.attempts(readers)) == 2
    await world.nothing_is_left()
