"""The supervisor's connection to the store, on a real server."""

import asyncio

import pytest
import redis.asyncio

from pagestream.fleet_link import FleetLink
from shared.messages import WorkerHeartbeat, WorkerPhase, decode_heartbeat, encode
from shared.redis_keys import RedisKeys
from tests.patience import PATIENCE_SECONDS

MODEL = "model"
CHANNEL = RedisKeys(MODEL).heartbeat_channel


async def test_heartbeats_are_received_and_invalid_ones_dropped(valkey) -> None:
    heard: asyncio.Queue[WorkerHeartbeat] = asyncio.Queue()
    link = FleetLink(valkey.url, RedisKeys(MODEL), heard.put_nowait)
    running = asyncio.create_task(link.run())
    beat = WorkerHeartbeat(worker_id="serve.a-0-0.0", phase=WorkerPhase.LOAD, progress=0.5)
    async with redis.asyncio.Redis(unix_socket_path=valkey.socket_path) as publisher:
        while not await publisher.publish(CHANNEL, b"nonsense"):
            await asyncio.sleep(0.01)  # until the link has subscribed
        await publisher.publish(CHANNEL, encode(WorkerHeartbeat(worker_id="supervisor", phase=WorkerPhase.CONVERT)))
        await publisher.publish(CHANNEL, encode(beat))
        assert await heard.get() == beat
    assert heard.empty()
    running.cancel()
    await asyncio.wait([running])
    await link.aclose()


async def test_phase_is_published_repeatedly_until_silenced(valkey, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagestream.fleet_link.BEAT_SECONDS", 0.05)
    link = FleetLink(valkey.url, RedisKeys(MODEL), lambda _: None)
    async with redis.asyncio.Redis(unix_socket_path=valkey.socket_path) as client, client.pubsub() as channel:
        await channel.subscribe(CHANNEL)
        await channel.get_message(timeout=PATIENCE_SECONDS)
        running = asyncio.create_task(link.run())
        link.announce(WorkerPhase.CONVERT, 0.25, "half of it")
        messages = [await channel.get_message(timeout=PATIENCE_SECONDS) for _ in range(3)]
        link.stop_announcing()
        while await channel.get_message(timeout=0.2) is not None:
            pass
    assert {decode_heartbeat(message["data"]) for message in messages if message} == {
        WorkerHeartbeat(worker_id="supervisor", phase=WorkerPhase.CONVERT, progress=0.25, detail="half of it")
    }
    running.cancel()
    await asyncio.wait([running])
    await link.aclose()


async def test_idle_link_wakes_only_for_messages(valkey) -> None:
    def timers() -> list[object]:
        return [timer for timer in asyncio.get_running_loop()._scheduled if not timer.cancelled()]  # type: ignore[attr-defined]

    heard: asyncio.Queue[WorkerHeartbeat] = asyncio.Queue()
    link = FleetLink(valkey.url, RedisKeys(MODEL), heard.put_nowait)
    running = asyncio.create_task(link.run())
    async with redis.asyncio.Redis(unix_socket_path=valkey.socket_path) as publisher:
        while not await publisher.publish(CHANNEL, b"nonsense"):
            await asyncio.sleep(0.01)
        await publisher.publish(CHANNEL, encode(WorkerHeartbeat(worker_id="w", phase=WorkerPhase.READY)))
        await heard.get()
    assert timers() == []
    running.cancel()
    await asyncio.wait([running])
    await link.aclose()


async def test_unreachable_store_is_awaited_without_reaping() -> None:
    link = FleetLink("unix:///nowhere/valkey.sock", RedisKeys(MODEL), lambda _: None)
    link.announce(WorkerPhase.DOWNLOAD, 0.0, "")
    running = asyncio.create_task(link.run())
    assert await link.reap("serve") == 0
    assert not running.done()
    running.cancel()
    await asyncio.wait([running])
    await link.aclose()
