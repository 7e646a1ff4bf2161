"""Clients of Redis Sentinel, which reports the address of a store's primary."""

from dataclasses import dataclass
from typing import Any

from redis.asyncio import ConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from shared.store_address import SentinelService, StoreAddress

SENTINEL_SECONDS = 0.5  # time limit of a Sentinel's reply; then the next one is asked


class Sentinels:
    """Clients of the Sentinels of one service."""

    def __init__(self, address: StoreAddress, service: SentinelService) -> None:
        store: dict[str, Any] = ConnectionPool.from_url(address.url).connection_kwargs
        tls = {name: value for name, value in store.items() if name.startswith("ssl_")}
        options: dict[str, Any] = {
            **service.credentials,
            **tls,
            "ssl": address.url.startswith("rediss:"),
            "protocol": 2,
            "retry": Retry(NoBackoff(), 0),
            "socket_timeout": SENTINEL_SECONDS,
            "socket_connect_timeout": SENTINEL_SECONDS,
        }
        self._service = service
        self._sentinels = Sentinel(service.hosts, sentinel_kwargs=options)  # type: ignore[no-untyped-call]

    async def find_primary(self) -> tuple[str, int]:
        """Return the host and port of the primary, as the first Sentinel that answers reports it.

        Raises:
            ConnectionError: If no Sentinel answers, or the primary is down, as they judge.
        """
        host, port = await self._sentinels.discover_master(self._service.name)
        return host, port

    async def reports(self) -> list["PrimaryReport"]:
        """Ask each Sentinel for the primary, and whether enough of them answer for a failover."""
        return [await self._report(client) for client in self._sentinels.sentinels]

    async def aclose(self) -> None:
        await self._sentinels.aclose()

    async def _report(self, client: Redis) -> "PrimaryReport":
        options = client.connection_pool.connection_kwargs
        sentinel = f"{options['host']}:{options['port']}"
        try:
            primary = await client.execute_command("SENTINEL GET-MASTER-ADDR-BY-NAME", self._service.name)  # type: ignore[no-untyped-call]
            if primary is None:
                return PrimaryReport(sentinel, "", f"it has no service {self._service.name!r}")
            await client.execute_command("SENTINEL CKQUORUM", self._service.name)  # type: ignore[no-untyped-call]
            state: Any = await client.sentinel_master(self._service.name)
        except (RedisError, OSError) as error:
            return PrimaryReport(sentinel, "", str(error))
        host, port = primary
        return PrimaryReport(sentinel, f"{host}:{port}", down_after_seconds=state["down-after-milliseconds"] / 1000)


@dataclass(frozen=True, slots=True)
class PrimaryReport:
    """What one Sentinel reports.

    Attributes:
        sentinel: Its host and port.
        primary: Host and port; empty with a problem.
        problem: Empty, or why the Sentinel would not lead to a primary after a failure.
        down_after_seconds: Silence after which the Sentinel takes the primary for dead.
    """

    sentinel: str
    primary: str
    problem: str = ""
    down_after_seconds: float = 0.0
