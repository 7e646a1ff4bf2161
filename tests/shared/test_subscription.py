"""A subscription survives connection losses and reports when messages may be missing."""

import asyncio
from typing import Any

import pytest

from shared.redis_client import connect
from shared.store_errors import got_no_reply, is_transient
from shared.subscription import GAP, Message, Subscription
from tests.patience import PATIENCE_SECONDS


async def next_of(subscription: Subscription) -> Any:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while (item := await subscription.get(1.0)) is None:
            pass
    return item


class TestOnAServer:
    @pytest.fixture
    async def subscription(self, connections):
        subscription = Subscription(connections.subscriber, ["a", "b"], ping_seconds=0.02)
        yield subscription
        await subscription.aclose()

    async def test_subscription_starts_with_gap_then_ordered_messages(self, subscription, connections):
        assert await next_of(subscription) is GAP
        for channel, data in (("a", b"1"), ("b", b"\xff"), ("c", b"2"), ("a", b"")):
            await connections.commands.publish(channel, data)
        assert [await next_of(subscription) for _ in range(3)] == [
            Message("a", b"1"),
            Message("b", b"\xff"),
            Message("a", b""),
        ]

    async def test_subscription_cut_connection_gives_gap_and_continues(self, subscription, connections):
        for _ in range(3):
            assert await next_of(subscription) is GAP
            await connections.commands.client_kill_filter(_type="pubsub")
        assert await next_of(subscription) is GAP
        await connections.commands.publish("a", b"1")
        assert await next_of(subscription) == Message("a", b"1")

    async def test_subscription_ping_replies_count_as_heard(self, subscription):
        assert await next_of(subscription) is GAP
        num_replies = subscription.num_replies
        async with asyncio.timeout(PATIENCE_SECONDS):
            while subscription.num_replies < num_replies + 3:
                assert await subscription.get(1.0) is None

    async def test_subscription_silent_connection_is_replaced(self, subscription, connections):
        assert await next_of(subscription) is GAP
        await connections.commands.client_pause(300, all=True)  # milliseconds: pings stay unanswered
        assert await next_of(subscription) is GAP


async def test_subscription_pings_only_after_silence(connections):
    clock = [0.0]
    subscription = Subscription(connections.subscriber, ["a"], ping_seconds=10, clock=lambda: clock[0])

    async def pings() -> int:
        stats: Any = await connections.commands.info("commandstats")
        return int(stats.get("cmdstat_ping", {"calls": 0})["calls"])

    try:
        assert await next_of(subscription) is GAP
        before = await pings()
        for clock[0] in (9.0, 18.0, 27.0):  # a message every 9 seconds
            await connections.commands.publish("a", b"1")
            assert await next_of(subscription) == Message("a", b"1")
        assert await pings() == before
        clock[0], num_replies = 37.0, subscription.num_replies
        async with asyncio.timeout(PATIENCE_SECONDS):
            while subscription.num_replies == num_replies:
                await subscription.get(1.0)
        assert await pings() == before + 1
    finally:
        await subscription.aclose()


async def test_subscription_store_away_gives_no_messages(tmp_path):
    away = connect(f"unix://{tmp_path}/no-server")
    subscription = Subscription(away.subscriber, ["a"])
    try:
        assert [await subscription.get(0.01) for _ in range(3)] == [None] * 3
        assert subscription.num_replies == 0
    finally:
        await subscription.aclose()
        await away.aclose()


async def test_client_library_does_not_retry_blocking_read(connections, keys):
    """A connection cut during a blocking read must raise to the caller and not read a second time."""
    await connections.commands.xgroup_create("stream", "group", id="0", mkstream=True)
    read = asyncio.create_task(connections.blocking.xreadgroup("group", "me", {"stream": ">"}, block=5000))
    while not (await connections.commands.info("clients"))["blocked_clients"]:
        await asyncio.sleep(0)
    await connections.commands.client_kill_filter(_type="normal", skipme=True)
    with pytest.raises(Exception) as caught:
        await read
    assert got_no_reply(caught.value)
    assert is_transient(caught.value)
