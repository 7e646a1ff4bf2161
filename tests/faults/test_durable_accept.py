"""--durable-accept replica: an accepted request is on the replica, so a failover right after it loses nothing."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import redis

from bench.serving.free_port import free_port
from gateway.store.acceptance import QueueRules
from gateway.store.inference_client import InferenceClient
from gateway.store.store_calls import NotReplicated
from shared.redis_client import connect
from shared.redis_keys import RedisKeys
from tests.builders import make_request
from tests.faults.store_site import StoreSite
from tests.faults.tcp_proxy import TcpProxy
from tests.patience import PATIENCE_SECONDS

LAG_SECONDS = 0.2
NUM_REQUESTS, NUM_AT_ONCE = 1_000, 100
KEYS = RedisKeys("m")


@pytest.fixture
def site(tmp_path: Path) -> Iterator[StoreSite]:
    site = StoreSite(tmp_path)
    yield site
    for server in site.servers.values():
        server.kill()
        server.wait()


@asynccontextmanager
async def lagging_replica(site: StoreSite) -> AsyncIterator[tuple[int, int, TcpProxy]]:
    """Yield the ports of a primary and of its replica, which gets everything 0.2 s late, and the proxy between them."""
    primary, replica = free_port(), free_port()
    site.start_server(primary)
    async with TcpProxy("127.0.0.1", primary) as proxy:
        site.start_server(replica, replica_of=proxy.port)
        await eventually(lambda: redis.Redis(port=replica).info("replication")["master_link_status"] == "up")
        proxy.delay_seconds = LAG_SECONDS
        yield primary, replica, proxy


async def eventually(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            try:
                if await asyncio.to_thread(is_so):
                    return
            except redis.RedisError:
                pass
            await asyncio.sleep(0.05)  # polls another process


@asynccontextmanager
async def running_client(port: int, timeout_seconds: float | None) -> AsyncIterator[InferenceClient]:
    connections = connect(f"redis://127.0.0.1:{port}/0")
    rules = QueueRules(max_requests=2 * NUM_REQUESTS, replica_timeout_seconds=timeout_seconds)
    client = InferenceClient(connections, KEYS, "gateway", queue_rules=rules)
    await client.start()
    yield client
    await client.close()
    await connections.aclose()


@pytest.mark.parametrize("is_durable", [True, False], ids=["replica", "primary"])
async def test_failover_after_acceptance(site: StoreSite, is_durable: bool) -> None:
    """The other mode loses the last requests; otherwise the test would prove nothing."""
    async with lagging_replica(site) as (primary, replica, proxy):
        if not is_durable:
            proxy.delay_seconds = 3_600.0  # the replica gets nothing until the failover
        async with running_client(primary, 5.0 if is_durable else None) as client:
            turns = asyncio.Semaphore(NUM_AT_ONCE)

            async def submit() -> str:
                async with turns:
                    stream = await client.submission.submit(make_request([3, 4]))
                    return stream.request_id

            accepted = await asyncio.gather(*(submit() for _ in range(NUM_REQUESTS)))
            site.servers[primary].kill()
            site.servers[primary].wait()
        survivor = redis.Redis(port=replica)
        survivor.replicaof("NO", "ONE")
        num_lost = sum(not survivor.exists(KEYS.request(request_id)) for request_id in accepted)
        assert (num_lost == 0) is is_durable


async def test_request_without_a_replica_is_refused_and_withdrawn(site: StoreSite) -> None:
    async with lagging_replica(site) as (primary, _, proxy), running_client(primary, 0.3) as client:
        proxy.is_silent = True
        requests = [make_request([3, 4]) for _ in range(3)]
        refused = await asyncio.gather(*map(client.submission.submit, requests), return_exceptions=True)
        assert [type(error) for error in refused] == [NotReplicated] * 3
        store = redis.Redis(port=primary)
        await eventually(lambda: store.xlen(KEYS.queue("interactive")) == 0)
        proxy.is_silent, proxy.delay_seconds = False, 0.0
        proxy.cut()  # the replica connects again
        await eventually(lambda: redis.Redis(port=primary).wait(1, 100) == 1)
        await client.submission.submit(make_request([3, 4]))
