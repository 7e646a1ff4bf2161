"""The reaper: when a worker is dead, and how its requests are requeued."""

import asyncio

import pytest

from engine_worker.transport.heartbeat import HeartbeatPublisher
from engine_worker.transport.reaper import MissedTicks, Reaper
from shared.messages import WorkerHeartbeat, WorkerPhase, encode
from shared.new_requests import RetentionTerms
from shared.reaping import list_worker_ids
from shared.redis_client import connect
from shared.redis_keys import GROUP
from shared.tasks import cancel_and_wait
from tests.engine_worker.transport.presence import FixedPresence
from tests.engine_worker.transport.rig import WORKER
from tests.patience import PATIENCE_SECONDS


def beat(worker_id: str = WORKER) -> bytes:
    return encode(WorkerHeartbeat(worker_id=worker_id, phase=WorkerPhase.READY))


class TestMissedTicks:
    def test_missed_ticks_worker_is_dead_after_the_limit(self):
        missed = MissedTicks(3)
        assert [missed.tick(["a"]) for _ in range(4)] == [[], [], [], ["a"]]

    def test_missed_ticks_beat_resets_the_count(self):
        missed = MissedTicks(2)
        for _ in range(10):
            missed.record_heartbeat("a")
            assert missed.tick(["a"]) == []
            assert missed.tick(["a"]) == []
        assert missed.tick(["a"]) == ["a"]

    def test_missed_ticks_are_counted_per_worker(self):
        missed = MissedTicks(2)
        missed.tick(["a"])
        missed.tick(["a", "b"])
        assert missed.tick(["a", "b"]) == ["a"]
        assert missed.tick(["b"]) == ["b"]
        assert missed.tick(["a"]) == []

    def test_missed_ticks_subscription_gap_resets_all_counts(self):
        missed = MissedTicks(2)
        missed.tick(["a"])
        missed.tick(["a"])
        missed.forget_all()
        assert missed.tick(["a"]) == []


class TestReaper:
    @pytest.fixture
    def presence(self):
        return FixedPresence(dead_after_seconds=3)

    @pytest.fixture
    async def w1_listens(self, connections, keys):
        async with connections.subscriber.pubsub() as channel:
            await channel.subscribe(keys.control_channel("w1.alive"))
            await channel.get_message(timeout=PATIENCE_SECONDS)
            yield

    @pytest.fixture
    def reaper(self, connections, keys, presence):
        return Reaper(connections, keys, presence)

    async def test_reaper_reaps_the_worker_with_an_old_beat(self, reaper, presence, rig):
        await rig.accept("a")
        await rig.claim()
        await rig.scripts.register("w1.alive")
        for worker_id, seconds in ((WORKER, 10), ("w2.ended", 10), ("w1.alive", 12)):
            await rig.scripts.beat(seconds, worker_id, lease_seconds=3, is_steady=False)
        presence.fleet_seconds = 12.9
        await reaper.tick(could_hear=False)
        assert reaper.faults.num_reaped == 0
        presence.fleet_seconds = 13
        await reaper.tick(could_hear=False)
        assert reaper.faults.num_reaped == 1
        assert await list_worker_ids(rig.redis, rig.keys) == ["w1.alive"]
        assert await rig.scripts.beats() == {"w1.alive": 12}
        assert await rig.stored("a", "attempt") == [b"2"]

    async def test_reaper_reaps_early_who_neither_beats_nor_listens(self, reaper, presence, rig, w1_listens):
        presence.dead_after_seconds = 15
        await rig.scripts.register("w1.alive")
        for worker_id in (WORKER, "w1.alive"):
            await rig.scripts.beat(10, worker_id, lease_seconds=3, is_steady=False)
        presence.fleet_seconds = 12.9
        await reaper.tick(could_hear=False)
        assert reaper.faults.num_reaped == 0
        presence.fleet_seconds = 13
        await reaper.tick(could_hear=False)
        assert await list_worker_ids(rig.redis, rig.keys) == ["w1.alive"]

    async def test_reaper_that_is_not_steady_reaps_only_zombies(self, reaper, presence, rig):
        presence.is_steady, presence.fleet_seconds = False, 1e6
        await rig.accept("a")
        await rig.scripts.beat(10, WORKER, lease_seconds=3, is_steady=False)
        await rig.redis.xreadgroup(GROUP, "zombie.1", {rig.keys.queue("interactive"): ">"})
        await reaper.tick(could_hear=False)
        assert await list_worker_ids(rig.redis, rig.keys) == [WORKER]

    async def test_reaper_that_does_not_observe_reads_nothing(self, reaper, presence, rig):
        presence.is_observer, presence.fleet_seconds = False, 1e6
        await rig.scripts.beat(10, WORKER, lease_seconds=3, is_steady=False)
        await rig.redis.delete(rig.keys.fence(WORKER))
        await reaper.tick(could_hear=True)
        assert await list_worker_ids(rig.redis, rig.keys) == [WORKER]

    async def test_reaper_reaps_only_the_silent_worker_of_an_older_release(self, reaper, rig):
        await rig.scripts.register("w1.alive")
        await rig.accept("a")
        await rig.claim()
        for _ in range(4):
            reaper.on_message(beat("w1.alive"))
            await reaper.tick(could_hear=True)
        assert reaper.faults.num_reaped == 1
        assert await list_worker_ids(rig.redis, rig.keys) == ["w1.alive"]
        assert await rig.stored("a", "attempt") == [b"2"]

    async def test_reaper_consumer_without_fence_is_reaped_at_once(self, reaper, rig):
        await rig.accept("a")
        await rig.redis.xreadgroup(GROUP, "zombie.1", {rig.keys.queue("interactive"): ">"})
        await reaper.tick(could_hear=False)
        assert await list_worker_ids(rig.redis, rig.keys) == [WORKER]
        assert reaper.faults.num_reaped == 1
        assert await rig.claim() == ["a"]

    async def test_reaper_does_not_count_a_worker_that_is_ending(self, reaper, rig):
        """A hand-back deletes the fence first, and the consumers queue by queue."""
        await rig.scripts.register("w1.ending")
        await rig.redis.delete(rig.keys.fence("w1.ending"))
        await reaper.tick(could_hear=False)
        assert await list_worker_ids(rig.redis, rig.keys) == [WORKER]
        assert reaper.faults.num_reaped == 0

    async def test_reaper_tick_without_subscription_does_not_count(self, reaper, rig):
        for _ in range(50):
            await reaper.tick(could_hear=False)
        assert reaper.faults.num_reaped == 0

    async def test_reaper_bad_heartbeat_is_counted_and_ignored(self, reaper, rig):
        for _ in range(4):
            reaper.on_message(b"\xc1")
            await reaper.tick(could_hear=True)
        assert (reaper.faults.num_bad_heartbeats, reaper.faults.num_reaped) == (4, 1)

    async def test_reaper_tick_without_store_raises_nothing(self, keys, tmp_path):
        away = connect(f"unix://{tmp_path}/no-server")
        try:
            await Reaper(away, keys, FixedPresence()).tick(could_hear=True)
        finally:
            await away.aclose()

    async def test_reaper_run_reaps_dead_and_keeps_beating_worker(self, connections, rig):
        await rig.scripts.register("w1.alive")
        publisher = HeartbeatPublisher(rig.redis, rig.keys)
        reaper = Reaper(connections, rig.keys, FixedPresence(dead_after_seconds=0.2), tick_seconds=0.02)
        task = asyncio.create_task(reaper.run())
        try:
            while not reaper.faults.num_reaped:
                publisher.set_latest(WorkerHeartbeat(worker_id="w1.alive", phase=WorkerPhase.READY))
                await publisher.beat()
                await asyncio.sleep(0.005)
        finally:
            await cancel_and_wait([task])
        assert await list_worker_ids(rig.redis, rig.keys) == ["w1.alive"]

    async def test_reaper_that_was_stopped_counts_one_tick(self, connections, rig):
        """Its clock jumps by a minute within a tick, as after SIGSTOP. No worker may be reaped."""
        jump = 0.0

        def clock() -> float:
            return asyncio.get_running_loop().time() + jump

        reaper = Reaper(connections, rig.keys, FixedPresence(dead_after_seconds=4), tick_seconds=0.2, clock=clock)
        task = asyncio.create_task(reaper.run())
        try:
            await asyncio.sleep(0.1)
            jump = 60.0
            await asyncio.sleep(0.3)
            assert reaper.faults.num_reaped == 0
        finally:
            await cancel_and_wait([task])

    @pytest.mark.parametrize("beats", [True, False], ids=["heartbeats", "silence"])
    async def test_reaper_pings_only_in_silent_ticks(self, connections, rig, beats):
        async def num_pings() -> int:
            stats = await rig.redis.info("commandstats")
            return int(stats.get("cmdstat_ping", {"calls": 0})["calls"])

        ticks: list[bool] = []  # `could_hear` of each tick
        pings: list[int] = []  # so far

        class Listener(Reaper):
            async def tick(self, *, could_hear: bool) -> None:
                await super().tick(could_hear=could_hear)
                ticks.append(could_hear)
                pings.append(await num_pings())
                if beats:
                    await rig.redis.publish(rig.keys.heartbeat_channel, beat())

        task = asyncio.create_task(Listener(connections, rig.keys, FixedPresence(), tick_seconds=0.4).run())
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                while len(pings) < 5:
                    await asyncio.sleep(0.05)
        finally:
            await cancel_and_wait([task])
        assert all(ticks[1:])  # the first tick finds the worker without a beat
        assert (pings[-1] == pings[1]) is beats

    async def test_reaper_tick_ends_orphaned_requests(self, reaper, rig):
        await rig.accept("a", terms=RetentionTerms(b"record", "holder", grace_seconds=0))
        await reaper.tick(could_hear=False)
        assert await rig.stored("a", "state") == [b"done"]
