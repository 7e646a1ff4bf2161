"""The KV feed on a real server, with a real engine and a fake model."""

import asyncio
from typing import Any

from engine_worker.transport.kv_feed import KVFeed
from shared.messages import decode_kv_snapshot
from shared.redis_client import RedisConnections
from shared.redis_keys import RedisKeys
from tests.builders import make_engine, make_request
from tests.patience import PATIENCE_SECONDS


class Source:
    def __init__(self) -> None:
        self.engine = make_engine(num_blocks=9, block_size=4)

    async def kv_view(self) -> dict[str, Any]:
        return self.engine.kv_view()

    async def kv_events(self, since: int) -> dict[str, Any]:
        return self.engine.kv_events(since)


async def next_snapshot(heard):
    async with asyncio.timeout(PATIENCE_SECONDS):
        while (message := await heard.get_message(ignore_subscribe_messages=True, timeout=1)) is None:
            pass
    return decode_kv_snapshot(message["data"])


async def test_kv_feed_snapshots_only_while_watched(connections: RedisConnections, keys: RedisKeys) -> None:
    source = Source()
    loaded: list[Source] = []
    redis = connections.commands
    feed = KVFeed(redis, keys, lambda: loaded[0] if loaded else None, lambda: "w.0")
    async with connections.subscriber.pubsub() as heard:
        await heard.subscribe(keys.kv_channel)
        await redis.set(keys.kv_watch, 1)
        await feed.publish_if_watched()  # no engine yet
        loaded.append(source)
        await redis.delete(keys.kv_watch)
        await feed.publish_if_watched()  # no watcher
        await redis.set(keys.kv_watch, 1)
        source.engine.add_request(make_request(6, "0123456789abcdef", max_tokens=50, ignore_eos=True))
        source.engine.step()
        await feed.publish_if_watched()
        snapshot = await next_snapshot(heard)
    (request,) = snapshot.requests
    assert (request.id, request.state, request.num_tokens) == ("0123456789ab#0", "running", 7)
    assert [snapshot.states[block] for block in request.blocks] == ["a"] * len(request.blocks)
    assert (snapshot.worker, snapshot.block_size, len(snapshot.states)) == ("w.0", 4, 9)


async def test_kv_feed_names_tenant_of_each_request(connections: RedisConnections, keys: RedisKeys) -> None:
    source = Source()
    await connections.commands.set(keys.kv_watch, 1)
    feed = KVFeed(connections.commands, keys, lambda: source, lambda: "w.0", lambda: {"a": "team-a"})
    for request_id in "ab":  # together they need more than eight blocks
        source.engine.add_request(make_request(8, request_id, max_tokens=20, ignore_eos=True))
    shown, moved = set(), set()
    async with connections.subscriber.pubsub() as heard:
        await heard.subscribe(keys.kv_channel)
        while source.engine.has_work:
            source.engine.step()
            await feed.publish_if_watched()
            snapshot = await next_snapshot(heard)
            shown |= {(request.id, request.tenant) for request in snapshot.requests}
            moved |= {(move.request_id, move.tenant) for move in snapshot.events if move.request_id}
    assert shown == {("a#0", "team-a"), ("b#0", "?")}  # the worker has no tenant for b
    assert moved and moved <= {("a", "team-a"), ("b", "?")}


async def test_kv_feed_keeps_tenant_of_moves_after_request_end(connections: RedisConnections, keys: RedisKeys) -> None:
    source, held = Source(), {"a": "team-a", "b": "team-a"}
    await connections.commands.set(keys.kv_watch, 1)
    feed = KVFeed(connections.commands, keys, lambda: source, lambda: "w.0", lambda: dict(held))
    await feed.publish_if_watched()
    for request_id in "ab":
        source.engine.add_request(make_request(8, request_id, max_tokens=20, ignore_eos=True))
    while source.engine.has_work:
        source.engine.step()
    held.clear()
    async with connections.subscriber.pubsub() as heard:
        await heard.subscribe(keys.kv_channel)
        await feed.publish_if_watched()
        moves = (await next_snapshot(heard)).events
    assert {move.tenant for move in moves if move.request_id} == {"team-a"}


async def test_kv_feed_sends_each_move_once(connections: RedisConnections, keys: RedisKeys) -> None:
    source = Source()
    await connections.commands.set(keys.kv_watch, 1)
    feed = KVFeed(connections.commands, keys, lambda: source, lambda: "w.0")
    for _ in range(2):  # together they need more than eight blocks
        source.engine.add_request(make_request(8, max_tokens=20, ignore_eos=True))
    async with connections.subscriber.pubsub() as heard:
        await heard.subscribe(keys.kv_channel)
        numbers = []
        while source.engine.has_work:
            source.engine.step()
            await feed.publish_if_watched()
            numbers += [move.number for move in (await next_snapshot(heard)).events]
    assert numbers == list(range(1, len(numbers) + 1))
    assert numbers
