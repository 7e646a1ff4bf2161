"""Random faults of the processes of a site. Each fault is repaired before it returns."""

import asyncio
import contextlib
import random
import signal
import time
from collections import Counter
from pathlib import Path

import redis
from redis.backoff import ConstantBackoff
from redis.retry import Retry

from tests.faults.site import Site
from tests.faults.store_site import StoreSite
from tests.faults.tcp_proxy import TcpProxy

MAX_PAUSE_SECONDS = 6.0  # twice --dead-after: some paused workers are reaped, others are not
MAX_STORE_OUTAGE_SECONDS = 1.5
MAX_CALM_SECONDS = 4.0
MAX_PROXY_FAULT_SECONDS = 4.0


class Disasters:
    def __init__(self, site: Site, source: random.Random, least: int) -> None:
        """Create a sequence of faults; at least `least` happen, however long each takes."""
        self._site = site
        self._random = source
        self._least = least
        self.counts: Counter[str] = Counter()

    async def run(self, seconds: float) -> None:
        """Run faults one after the other for this long; the last one has ended on return."""
        ends_at = time.monotonic() + seconds
        kinds = [
            self._worker_killed, self._worker_killed, self._worker_paused, self._worker_drained, self._gateway_killed,
            self._gateway_drained, self._listeners_dropped, self._connections_dropped,
        ]  # fmt: skip
        if self._site.stores is not None:
            kinds += [self._primary_killed, self._primary_stopped, self._primary_demoted, self._store_wiped]
        else:
            kinds.append(self._store_killed)
        if self._site.proxies:
            kinds += 2 * [self._proxy_resets, self._proxy_closes, self._proxy_stalls]
        while time.monotonic() < ends_at or self.counts.total() < self._least:
            await asyncio.sleep(self._random.uniform(0.5, MAX_CALM_SECONDS))  # interval between faults
            disaster = self._random.choice(kinds)
            self.counts[disaster.__name__.strip("_")] += 1
            await disaster()

    async def _worker_killed(self) -> None:
        await self._site.end(self._worker(), signal.SIGKILL)
        self._site.start_worker()

    async def _worker_paused(self) -> None:
        process = self._site.fleet.processes[self._worker()]
        process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(self._random.uniform(0.5, MAX_PAUSE_SECONDS))
        process.send_signal(signal.SIGCONT)

    async def _worker_drained(self) -> None:
        name = self._worker()
        is_up = _catches(self._site.fleet.processes[name].pid, signal.SIGTERM)
        status = await self._site.end(name)
        # A worker that is still importing has claimed nothing; the signal ends it as any process.
        ended_well = status == 0 or (status == -signal.SIGTERM and not is_up)
        assert ended_well, f"a drained worker ended with {status}"
        self._site.start_worker()

    async def _gateway_killed(self) -> None:
        await self._restart_gateway(signal.SIGKILL)

    async def _gateway_drained(self) -> None:
        await self._restart_gateway(signal.SIGTERM)

    async def _restart_gateway(self, number: signal.Signals) -> None:
        name = self._random.choice(list(self._site.ports))
        await self._site.end(name, number)
        self._site.start_gateway(name)

    async def _store_killed(self) -> None:
        await asyncio.to_thread(self._site.store.kill)
        await asyncio.sleep(self._random.uniform(0.0, MAX_STORE_OUTAGE_SECONDS))
        await asyncio.to_thread(self._site.store.start)

    async def _primary_killed(self) -> None:
        stores = self._stores()
        port = await asyncio.to_thread(stores.kill_primary)
        await asyncio.to_thread(self._replace, stores, port)

    async def _primary_stopped(self) -> None:
        """Stop the primary until another one is elected. It does not continue beside it."""
        stores = self._stores()
        port = await asyncio.to_thread(stores.stop_primary)
        await asyncio.to_thread(stores.wait_until_primary_is_not, port)
        stores.servers[port].kill()
        stores.servers[port].wait()
        await asyncio.to_thread(self._replace, stores, port)

    async def _primary_demoted(self) -> None:
        stores = self._stores()
        await asyncio.to_thread(stores.fail_over)
        await asyncio.to_thread(stores.wait_until_whole)

    async def _store_wiped(self) -> None:
        await asyncio.to_thread(self._wipe)

    def _wipe(self) -> None:
        with self._client() as client:
            client.flushall()

    def _stores(self) -> StoreSite:
        assert self._site.stores is not None
        return self._site.stores

    @staticmethod
    def _replace(stores: StoreSite, port: int) -> None:
        """Start the ended server again, as the replica of the new primary."""
        stores.wait_until_primary_is_not(port)
        stores.start_server(port, replica_of=stores.primary)
        stores.wait_until_whole()

    async def _listeners_dropped(self) -> None:
        await asyncio.to_thread(self._drop, "pubsub")

    async def _connections_dropped(self) -> None:
        await asyncio.to_thread(self._drop, "normal")

    async def _proxy_resets(self) -> None:
        self._proxy().cut()

    async def _proxy_closes(self) -> None:
        """Accept and close connections, as a proxy does while its store is away."""
        proxy = self._proxy()
        proxy.is_down = True
        proxy.cut()
        await asyncio.sleep(self._random.uniform(0.5, MAX_PROXY_FAULT_SECONDS))
        proxy.is_down = False

    async def _proxy_stalls(self) -> None:
        """Drop bytes on open connections, then reset them."""
        proxy = self._proxy()
        proxy.is_silent = True
        await asyncio.sleep(self._random.uniform(0.5, MAX_PROXY_FAULT_SECONDS))
        proxy.cut()
        proxy.is_silent = False

    def _proxy(self) -> TcpProxy:
        return self._random.choice(list(self._site.proxies.values()))

    def _drop(self, kind: str) -> None:
        with self._client() as client, contextlib.suppress(redis.ConnectionError):
            client.client_kill_filter(_type=kind, skipme=True)

    def _client(self) -> redis.Redis:
        """Return a client that outlasts a failover: haproxy closes connections, or leads to the old primary."""
        errors = (redis.ConnectionError, redis.TimeoutError, redis.ReadOnlyError)
        retry = Retry(ConstantBackoff(0.2), retries=50, supported_errors=errors)
        return redis.Redis.from_url(self._site.url_of_store, retry=retry)

    def _worker(self) -> str:
        return self._random.choice(self._site.worker_names)


def _catches(pid: int, number: signal.Signals) -> bool:
    """Return whether the process handles the signal; SigCgt in proc(5) is a mask of handled signals."""
    status = Path(f"/proc/{pid}/status").read_text()
    (mask,) = (line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(mask, 16) >> (number - 1) & 1)
