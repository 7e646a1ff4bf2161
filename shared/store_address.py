"""Where the store's primary is: at a fixed address, or where Redis Sentinel reports it.

redis://, rediss://, unix://        a fixed address, which may be a proxy's; see redis-py's from_url()
redis+sentinel://[USER:PASSWORD@]HOST[:PORT][,HOST[:PORT] ...]/SERVICE[/DATABASE][?OPTIONS]
rediss+sentinel://...               the same with TLS, to the Sentinels too

USER and PASSWORD are the store's. OPTIONS are redis-py's for the store's connections, and sentinel_username and
sentinel_password.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import SplitResult, parse_qsl, unquote, urlencode, urlsplit

from redis.asyncio import ConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

SENTINEL_PORT = 26379
SENTINEL_SECONDS = 0.5  # time limit of a Sentinel's reply; then the next one is asked
_SENTINEL_SCHEMES = {"redis+sentinel": "redis", "rediss+sentinel": "rediss"}
_SENTINEL_FORM = "redis+sentinel://[USER:PASSWORD@]HOST:PORT[,HOST:PORT ...]/SERVICE[/DATABASE]"


@dataclass(frozen=True, slots=True)
class SentinelService:
    """A store whose primary Sentinels know."""

    name: str
    hosts: tuple[tuple[str, int], ...]  # of the Sentinels
    credentials: Mapping[str, str] = field(default_factory=dict, repr=False)  # username and password for them


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """What the URL of a store says.

    Attributes:
        url: A URL for redis-py. With `service`, its host is that of a Sentinel, and only the rest is used.
        service: None if the address is fixed.
    """

    url: str = field(repr=False)
    service: SentinelService | None = None


def store_url(text: str) -> str:
    """Return the URL of a setting as it is.

    Raises:
        ValueError: If it is none of the forms above.
    """
    ConnectionPool.from_url(store_address(text).url)
    return text


def store_address(url: str) -> StoreAddress:
    """Return the parts of a URL.

    Raises:
        ValueError: If the address of a Sentinel or the service is missing or wrong.
    """
    parts = urlsplit(url)
    if parts.scheme not in _SENTINEL_SCHEMES:
        return StoreAddress(url)
    user, _, hosts = parts.netloc.rpartition("@")
    name, _, database = parts.path.strip("/").partition("/")
    if not name:
        raise ValueError(f"the service's name is missing; expected {_SENTINEL_FORM}")
    if database and not database.isdigit():  # redis-py would use database 0
        raise ValueError(f"database {database!r}: expected a number of 0 or more")
    options = dict(parse_qsl(parts.query))
    credentials = {
        word: options.pop(f"sentinel_{word}") for word in ("username", "password") if f"sentinel_{word}" in options
    }
    service = SentinelService(unquote(name), tuple(map(_sentinel_host, hosts.split(","))), credentials)
    host, port = service.hosts[0]
    netloc = f"{user}@" * bool(user) + (f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
    scheme = _SENTINEL_SCHEMES[parts.scheme]
    return StoreAddress(SplitResult(scheme, netloc, f"/{database}", urlencode(options), "").geturl(), service)


def _sentinel_host(text: str) -> tuple[str, int]:
    try:
        parts = urlsplit(f"//{text}")
        host, port = parts.hostname, parts.port or SENTINEL_PORT
    except ValueError as error:
        raise ValueError(f"Sentinel {text!r}: {error}; expected HOST:PORT") from error
    if not host:
        raise ValueError(f"a Sentinel's host is missing; expected {_SENTINEL_FORM}")
    return host, port


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
        except (RedisError, OSError) as error:
            return PrimaryReport(sentinel, "", str(error))
        host, port = primary
        return PrimaryReport(sentinel, f"{host}:{port}")


@dataclass(frozen=True, slots=True)
class PrimaryReport:
    """What one Sentinel reports.

    Attributes:
        sentinel: Its host and port.
        primary: Host and port; empty with a problem.
        problem: Empty, or why the Sentinel would not lead to a primary after a failure.
    """

    sentinel: str
    primary: str
    problem: str = ""
