"""A store found by its Sentinels fails over, without a proxy: the connections follow, and all streams are whole."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path

import pytest
from redis.exceptions import ConnectionError, RedisError

from pagestream.store_checks import check_redis
from shared.command_connection import Address, CommandConnection
from shared.redis_client import RedisConnections, connect
from shared.subscription import GAP, Message, Subscription
from tests.faults.store_site import DOWN_AFTER_SECONDS, StoreSite, running_store_site
from tests.faults.streams import Start, starting_streams
from tests.faults.test_failover import MAX_SILENCE_SECONDS, demote, site_of

pytestmark = pytest.mark.timeout(600)
ELECTION_SECONDS = 30.0  # limit for the Sentinels, on a busy machine


async def until_written(connections: RedisConnections) -> None:
    async with asyncio.timeout(ELECTION_SECONDS):
        while True:
            try:
                await connections.commands.set("x", b"1")
                assert await connections.blocking.get("x") == b"1"
                return
            except (RedisError, OSError):
                await asyncio.sleep(0.1)


async def test_connections_follow_a_stopped_primary(tmp_path: Path) -> None:
    """Its sockets stay open, so that only the Sentinels tell."""
    with running_store_site(tmp_path / "stores", has_proxy=False) as store:
        assert [finding.status for finding in await check_redis(store.sentinel_url)][:2] == ["ok", "ok"]
        unknown = await check_redis(store.sentinel_url + "-2")
        assert [(finding.check, finding.status) for finding in unknown] == [("sentinels", "fail"), ("store", "fail")]
        connections = connect(store.sentinel_url)
        following = asyncio.create_task(connections.follow_primary())
        subscription = Subscription(connections.subscriber, ["channel"])
        try:
            await until_written(connections)
            assert await subscription.get(5.0) is GAP
            stopped = store.stop_primary()
            async with asyncio.timeout(DOWN_AFTER_SECONDS + ELECTION_SECONDS):
                while await subscription.get(0.2) is not GAP:
                    pass
            await until_written(connections)
            assert store.primary != stopped
            await connections.commands.publish("channel", b"text")
            assert await subscription.get(5.0) == Message("channel", b"text")
        finally:
            following.cancel()
            await subscription.aclose()
            await connections.aclose()


async def test_replica_is_no_primary(tmp_path: Path) -> None:
    """Until a Sentinel reconfigures the old primary, an address may be that of a replica."""
    with running_store_site(tmp_path / "stores", has_proxy=False) as store:
        port = store.replica

        async def find() -> tuple[str, int]:
            return "127.0.0.1", port

        connection = CommandConnection(Address("", "", 0, None, (), (), find), timeout_seconds=5.0)
        with pytest.raises(ConnectionError, match="primary"):
            await connection.execute(("PING",))
        port = store.primary
        assert await connection.execute(("PING",)) == b"PONG"
        connection.close()


@pytest.fixture
async def start_streams(demo_model_dir: Path) -> AsyncIterator[Start]:
    async with starting_streams(demo_model_dir) as start:
        yield start


async def end_primary(store: StoreSite, end: Callable[[StoreSite], int]) -> None:
    port = await asyncio.to_thread(end, store)
    await asyncio.to_thread(store.wait_until_primary_is_not, port)


FAULTS: dict[str, Callable[[StoreSite], Awaitable[None]]] = {
    "killed": partial(end_primary, end=StoreSite.kill_primary),
    "stopped": partial(end_primary, end=StoreSite.stop_primary),
    "demoted": demote,
    "demoted without coordination": partial(demote, is_coordinated=False),
}


@pytest.mark.long
@pytest.mark.parametrize("fault", FAULTS)
async def test_streams_follow_the_primary(
    fault: str, demo_model_dir: Path, tmp_path: Path, start_streams: Start
) -> None:
    with running_store_site(tmp_path / "stores", has_proxy=False) as store:
        async with site_of(store, tmp_path / "site", demo_model_dir, url=store.sentinel_url) as site:
            streams = await start_streams(site, 50)
            await FAULTS[fault](store)
            await streams.are_whole(MAX_SILENCE_SECONDS)
