"""Connections to Redis or Valkey, without redis-py's retries.

Measured with redis-py 8.1: by default it repeats any command ten times, so an XADD with three lost replies left four
entries, and its time-out of 5 s breaks longer blocking reads. Here nothing is repeated; only callers of our scripts may
do that. Commands and scripts share one pipelined connection; blocking reads, subscriptions, and redis-py's pipelines
have others.
"""

import asyncio
import logging
import math
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from redis.asyncio import (
    BlockingConnectionPool,
    Connection,
    ConnectionPool,
    Redis,
    SSLConnection,
    UnixDomainSocketConnection,
)
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError, RedisError, ResponseError

from shared.cluster_nodes import ClusterNodes
from shared.command_connection import Address, CommandConnection, FindPrimary, check_is_primary
from shared.sentinels import Sentinels
from shared.store_address import StoreAddress, store_address
from shared.store_errors import rule_of

SOCKET_TIMEOUT_SECONDS = 5.0
BLOCK_SECONDS = 1.0  # maximum of a blocking read, which ends on a tick; far below the socket time-out
RESET_SECONDS = 1.0  # minimum between two resets, because many commands fail together
# The kernel closes a connection if the other machine acknowledges nothing for this time (TCP_USER_TIMEOUT). It probes
# an idle connection once a second after as much silence. By default it would send for 15 minutes.
DEAD_PEER_SECONDS = 5
FOLLOW_SECONDS = 0.5  # between two questions for the primary

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RedisConnections:
    """Three clients of one server. Close them with aclose()."""

    commands: "CommandRedis"  # short commands and scripts
    blocking: Redis  # XREADGROUP BLOCK of one reader
    subscriber: Redis  # pub/sub
    finder: Sentinels | ClusterNodes | None = None  # of the primary; None: the address is fixed

    async def follow_primary(self) -> None:
        """Reset the connections when another primary is reported. Runs until cancelled.

        A primary that is stopped or cut off closes nothing: its connections would wait for their time-outs.
        """
        if self.finder is None:
            await asyncio.Event().wait()
            return
        known: tuple[str, int] | None = None
        while True:
            with suppress(RedisError, OSError):  # who needs an address now logs the error
                found = await self.finder.find_primary()
                if known not in (None, found):
                    logger.warning("store: the primary is now %s:%d", *found)
                    await self.reset()
                known = found
            await asyncio.sleep(FOLLOW_SECONDS)

    async def reset(self) -> None:
        """Close all connections, including those in use. Their commands fail, and subscribers reconnect."""
        self.commands.connection_of_commands.close()
        for client in (self.commands, self.blocking, self.subscriber):
            with suppress(RedisError, OSError):
                await client.connection_pool.disconnect(inuse_connections=True)

    async def aclose(self) -> None:
        for client in (self.commands, self.blocking, self.subscriber):
            await client.aclose(close_connection_pool=True)
        if self.finder is not None:
            await self.finder.aclose()


Observe = Callable[[str, float, bool], None]  # command, seconds until its reply, whether it failed


def connect(url: str, *, hash_tag: str = "", observe: Observe | None = None) -> RedisConnections:
    """Create the clients, which connect on first use.

    Args:
        url: A URL of store_address.py.
        hash_tag: Of the keys (RedisKeys.hash_tag), which decides on the server in a cluster.
        observe: Called after each command of `commands`, except pipelines.
    """
    address = store_address(url)
    finder = _finder(address, hash_tag)
    find_primary = None if finder is None else finder.find_primary
    pool = partial(_pool, address.url, find_primary)
    shared_pool = pool(BlockingConnectionPool, 8, timeout=SOCKET_TIMEOUT_SECONDS)
    commands = CommandRedis(shared_pool, Address.of(shared_pool, find_primary), observe or _not_observed)
    blocking = _BlockingRedis(connection_pool=pool(ConnectionPool, 2))
    subscriber = Redis(connection_pool=pool(ConnectionPool, 8))
    connections = RedisConnections(commands, blocking, subscriber, finder)
    commands.on_demoted = blocking.on_demoted = _Resets(connections).request
    return connections


def _finder(address: StoreAddress, hash_tag: str) -> Sentinels | ClusterNodes | None:
    if address.service is not None:
        return Sentinels(address, address.service)
    return ClusterNodes(address, hash_tag) if address.nodes else None


def is_missing_group(error: RedisError) -> bool:
    """Return whether the error is NOGROUP: the store lost its data, or a model's keys were deleted."""
    return isinstance(error, ResponseError) and str(error).startswith("NOGROUP")


def _with_connection_errors(connection_class: Any) -> Any:
    """Return a subclass of redis-py's connection class that raises ConnectionError for a write on a closed transport.

    Such a write raises RuntimeError in uvloop (MagicStack/uvloop#506), TypeError in CPython (redis/redis-py#4287), and
    AttributeError if the connection is closed between redis-py's check and its write.
    """

    class Sending(connection_class):  # type: ignore[misc]
        async def send_packed_command(self, command: Any, check_health: bool = True) -> None:
            try:
                await super().send_packed_command(command, check_health)
            except (RuntimeError, TypeError, AttributeError) as error:
                raise ConnectionError(f"the connection was closed while a command was written: {error}") from error

    return Sending


def _at_primary(connection_class: Any, find_primary: FindPrimary) -> Any:
    """Return a subclass that connects to the primary, and raises ConnectionError if the server there is none."""

    class AtPrimary(connection_class):  # type: ignore[misc]
        async def connect(self) -> None:
            if not self.is_connected:
                self.host, self.port = await find_primary()
            await super().connect()

    return AtPrimary


async def _greet_primary(connection: Any) -> None:
    await connection.on_connect()  # redis-py's AUTH and SELECT
    await connection.send_command("ROLE")
    check_is_primary(await connection.read_response())


# Options that the system lacks are left out: macOS has no user time-out.
_DEAD_PEER_OPTIONS: dict[int, int] = {
    getattr(socket, name): value
    for name, value in {
        "TCP_KEEPIDLE": DEAD_PEER_SECONDS,
        "TCP_KEEPINTVL": 1,
        "TCP_KEEPCNT": DEAD_PEER_SECONDS,
        "TCP_USER_TIMEOUT": DEAD_PEER_SECONDS * 1000,
    }.items()
    if hasattr(socket, name)
}
_CONNECTION_CLASSES: dict[type[Any], type[Any]] = {
    each: _with_connection_errors(each) for each in (Connection, SSLConnection, UnixDomainSocketConnection)
}


class _Resets:
    """Resets connections to a server that is no longer the primary, at most once in RESET_SECONDS."""

    def __init__(self, connections: RedisConnections) -> None:
        self._connections = connections
        self._not_before = -math.inf
        self._task: asyncio.Task[None] | None = None  # the event loop itself keeps weak references only

    def request(self, error: Exception) -> None:
        now = time.monotonic()
        if now >= self._not_before:
            self._not_before = now + RESET_SECONDS
            logger.warning("store: connections reset: %s", error)
            self._task = asyncio.create_task(self._connections.reset())


class CommandRedis(Redis):
    """A client whose commands and scripts share one connection, without redis-py's pool, counters and retries."""

    on_demoted: Callable[[Exception], None]  # called for errors after which all open connections are useless

    def __init__(self, pool: ConnectionPool, address: Address, observe: Observe) -> None:
        """Create the client. `pool` is for redis-py's pipelines."""
        super().__init__(connection_pool=pool)
        self.connection_of_commands = CommandConnection(address, SOCKET_TIMEOUT_SECONDS)
        self._observe = observe

    async def execute_command(self, *words: Any, **options: Any) -> Any:
        name = words[0]
        started = time.perf_counter()
        failed = True
        try:
            reply = await self.connection_of_commands.execute((*name.split(), *words[1:]))  # "SCRIPT LOAD" is two words
            failed = False
        except RedisError as error:
            if rule_of(error).closes_connections:
                self.on_demoted(error)
            raise
        finally:
            self._observe(name, time.perf_counter() - started, failed)
        options.pop("keys", None)  # redis-py names them for its cache
        to_result = self.response_callbacks.get(name)
        return reply if to_result is None else to_result(reply, **options)

    async def aclose(self, close_connection_pool: bool | None = None) -> None:
        self.connection_of_commands.close()
        await super().aclose(close_connection_pool)


class _BlockingRedis(Redis):
    on_demoted: Callable[[Exception], None]

    async def execute_command(self, *words: Any, **options: Any) -> Any:
        try:
            return await super().execute_command(*words, **options)  # type: ignore[no-untyped-call]
        except (RedisError, OSError) as error:
            if rule_of(error).closes_connections:
                self.on_demoted(error)
            raise


def _not_observed(_command: str, _seconds: float, _failed: bool) -> None:
    pass


def _pool(
    url: str,
    find_primary: FindPrimary | None,
    pool_class: type[ConnectionPool],
    max_connections: int,
    **pool_options: Any,
) -> ConnectionPool:
    pool = pool_class.from_url(
        url,
        max_connections=max_connections,
        retry=Retry(NoBackoff(), 0),
        socket_timeout=SOCKET_TIMEOUT_SECONDS,
        socket_connect_timeout=SOCKET_TIMEOUT_SECONDS,
        protocol=2,  # one reply shape on every server version
        **pool_options,
    )
    if pool.connection_class is not UnixDomainSocketConnection:
        pool.connection_kwargs["socket_keepalive_options"] = _DEAD_PEER_OPTIONS
    pool.connection_class = _CONNECTION_CLASSES[pool.connection_class]
    if find_primary is not None:
        pool.connection_class = _at_primary(pool.connection_class, find_primary)
        pool.connection_kwargs["redis_connect_func"] = _greet_primary
    return pool
