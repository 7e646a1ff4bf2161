"""A primary and a replica with a delay. Their common address always leads to the primary."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from redis.asyncio import Redis

from bench.serving.free_port import free_port
from tests.faults.store_site import StoreSite
from tests.faults.tcp_proxy import TcpProxy
from tests.patience import PATIENCE_SECONDS

LAG_SECONDS = 0.02


@dataclass
class ReplicatedStore:
    site: StoreSite
    front: TcpProxy
    replication: TcpProxy
    replica: int

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.front.port}/0"

    async def catch_up(self) -> None:
        """Wait until the replica has everything that the primary has now."""
        async with Redis(port=self.front.target_port) as primary, Redis(port=self.replica) as replica:
            wanted = int((await primary.info("replication"))["master_repl_offset"])
            async with asyncio.timeout(PATIENCE_SECONDS):
                while int((await replica.info("replication"))["slave_repl_offset"]) < wanted:
                    await asyncio.sleep(0.005)  # polls another process

    async def fail_over(self) -> None:
        """Kill the primary and promote its replica without the last writes. It serves after resume()."""
        self.front.is_down = self.replication.is_down = True
        primary = self.site.servers.pop(self.front.target_port)
        primary.kill()
        self.replication.cut()
        self.front.cut()
        primary.wait()
        async with Redis(port=self.replica) as promoted:
            await promoted.replicaof("NO", "ONE")
        self.front.target_port = self.replication.target_port = self.replica

    async def resume(self) -> None:
        """Let clients reach the new primary, and start a replica of it."""
        self.front.is_down = self.replication.is_down = False
        self.replica = await self._start_replica()

    async def _start_replica(self) -> int:
        port = free_port()
        self.site.start_server(port, replica_of=self.replication.port)
        async with asyncio.timeout(PATIENCE_SECONDS), Redis(port=port) as replica:
            while not await _is_in_step(replica):
                await asyncio.sleep(0.01)  # polls another process
        return port


async def _is_in_step(replica: Redis) -> bool:
    try:
        return str((await replica.info("replication"))["master_link_status"]) == "up"
    except (ConnectionError, OSError):
        return False


@asynccontextmanager
async def replicated_store(directory: Path) -> AsyncIterator[ReplicatedStore]:
    site = StoreSite(directory)
    site.start_server(primary := free_port())
    try:
        async with (
            TcpProxy("127.0.0.1", primary) as front,
            TcpProxy("127.0.0.1", primary, delay_seconds=LAG_SECONDS) as replication,
        ):
            store = ReplicatedStore(site, front, replication, replica=0)
            store.replica = await store._start_replica()
            yield store
    finally:
        for server in site.servers.values():
            server.kill()
            server.wait()
