"""Heartbeats, cancel hints, and the start of an incarnation."""

import asyncio

import pytest

from engine_worker.transport.control_messages import ControlMessages
from engine_worker.transport.heartbeat import HeartbeatPublisher
from engine_worker.transport.incarnation import register
from shared.messages import WorkerHeartbeat, WorkerPhase, decode_heartbeat
from shared.reaping import list_worker_ids, reap_worker
from shared.redis_client import connect
from shared.redis_scripts import Demand, Fenced
from shared.tasks import cancel_and_wait
from tests.engine_worker.transport.rig import WORKER


def heartbeat(step: int) -> WorkerHeartbeat:
    return WorkerHeartbeat(worker_id=WORKER, phase=WorkerPhase.READY, step=step)


async def test_heartbeat_publishes_only_the_newest_offer(rig, heard):
    publisher = HeartbeatPublisher(rig.redis, rig.keys)
    async with heard(rig.keys.heartbeat_channel) as channel:
        await publisher.beat()  # without an offer
        publisher.set_latest(heartbeat(1))
        publisher.set_latest(heartbeat(2))
        await publisher.beat()
        await publisher.beat()  # a hung engine loop offers nothing, so nothing is published
        publisher.set_latest(heartbeat(3))
        await publisher.beat()
        assert [decode_heartbeat(await channel.next()).step for _ in range(2)] == [2, 3]


async def test_heartbeat_is_published_once_per_offer(rig, heard):
    """An idle worker uses one timer for both."""
    publisher = HeartbeatPublisher(rig.redis, rig.keys)
    async with heard(rig.keys.heartbeat_channel) as channel:
        task = asyncio.create_task(publisher.run())
        try:
            for step in (1, 2, 3):
                publisher.set_latest(heartbeat(step))
                assert decode_heartbeat(await channel.next()).step == step
        finally:
            await cancel_and_wait([task])


async def test_heartbeat_send_failure_is_counted(keys, tmp_path):
    away = connect(f"unix://{tmp_path}/no-server")
    try:
        publisher = HeartbeatPublisher(away.commands, keys)
        publisher.set_latest(heartbeat(1))
        await publisher.beat()
        assert publisher.faults.num_failures == 1
    finally:
        await away.aclose()


async def test_control_messages_reach_only_their_worker(rig, connections):
    hints: asyncio.Queue[str] = asyncio.Queue()
    task = asyncio.create_task(ControlMessages(connections.subscriber, rig.keys, hints.put_nowait).run(WORKER))
    try:
        channel = rig.keys.control_channel(WORKER)
        while not (await rig.redis.pubsub_numsub(channel))[0][1]:
            await asyncio.sleep(0)
        await rig.redis.publish(rig.keys.control_channel("w1.other"), b"b")
        await rig.redis.publish(channel, b"\xff")
        await rig.accept("a")
        await rig.claim()
        await rig.scripts.cancel("a", "interactive")
        assert [await hints.get(), await hints.get()] == ["\ufffd", "a"]
    finally:
        await cancel_and_wait([task])


async def test_register_again_gets_new_id_and_requeues(rig, connections):
    first = await register(connections, rig.keys, "w7")
    await rig.accept("a")
    assert len(await first.requests.claim(Demand(1))) == 1
    second = await register(connections, rig.keys, "w7", previous=first)
    assert second.worker_id.startswith("w7.")
    assert second.worker_id != first.worker_id
    with pytest.raises(Fenced):
        await first.requests.claim(Demand(1))
    (claimed,) = await second.requests.claim(Demand(1))
    assert (claimed.request.request_id, claimed.attempt) == ("a", 1)
    assert await list_worker_ids(rig.redis, rig.keys) == sorted([WORKER, second.worker_id])


async def test_register_after_store_loss_claims_again(rig, connections):
    first = await register(connections, rig.keys, "w7")
    await rig.redis.flushall()
    second = await register(connections, rig.keys, "w7", previous=first)
    await rig.accept("a")
    assert len(await second.requests.claim(Demand(1))) == 1
    await reap_worker(rig.scripts, second.worker_id)
