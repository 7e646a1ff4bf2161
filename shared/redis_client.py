"""Connections to Redis or Valkey, without redis-py's retries.

Measured with redis-py 8.1: by default it repeats any command ten times, so an XADD with three lost replies left four
entries, and its time-out of 5 s breaks longer blocking reads. Here nothing is repeated; only callers of our scripts may
do that. Blocking reads, subscriptions, and commands have separate connections.
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import hiredis
from redis.asyncio import (
    BlockingConnectionPool,
    Connection,
    ConnectionPool,
    Redis,
    SSLConnection,
    UnixDomainSocketConnection,
)
from redis.asyncio.connection import AbstractConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError, RedisError, ResponseError, TimeoutError

from shared.store_errors import rule_of

SOCKET_TIMEOUT_SECONDS = 5.0
BLOCK_SECONDS = 1.0  # maximum of a blocking read, which ends on a tick; far below the socket time-out
RESET_SECONDS = 1.0  # minimum between two resets, because many commands fail together

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RedisConnections:
    """Three clients of one server. Close them with aclose()."""

    commands: Redis  # short commands and scripts; a small pool, so that concurrent callers need not wait
    blocking: Redis  # XREADGROUP BLOCK of one reader
    subscriber: Redis  # pub/sub

    async def reset(self) -> None:
        """Close all connections, including those in use. Their commands fail, and subscribers reconnect."""
        for client in (self.commands, self.blocking, self.subscriber):
            with suppress(RedisError, OSError):
                await client.connection_pool.disconnect(inuse_connections=True)

    async def aclose(self) -> None:
        for client in (self.commands, self.blocking, self.subscriber):
            await client.aclose(close_connection_pool=True)


Observe = Callable[[str, float, bool], None]  # command, seconds until its reply, whether it failed


def connect(
    url: str, *, max_command_connections: int = 8, observe: Observe | None = None, num_models: int = 1
) -> RedisConnections:
    """Create the clients, which connect on first use.

    Args:
        url: A redis://, rediss:// or unix:// URL.
        max_command_connections: Size of the pool for commands, per model.
        observe: Called after each command of `commands`, except pipelines.
        num_models: Number of models that share the connections.
    """
    max_commands = max_command_connections * num_models
    commands = _CommandRedis(
        _pool(url, _CommandPool, max_commands, timeout=SOCKET_TIMEOUT_SECONDS), observe or _not_observed
    )
    blocking = _CommandRedis(_pool(url, ConnectionPool, 2), _not_observed)
    subscriber = Redis(connection_pool=_pool(url, ConnectionPool, 8 * num_models))
    connections = RedisConnections(commands, blocking, subscriber)
    commands.on_demoted = blocking.on_demoted = _Resets(connections).request
    return connections


def is_missing_group(error: RedisError) -> bool:
    """Return whether the error is NOGROUP: the store lost its data, or a model's keys were deleted."""
    return isinstance(error, ResponseError) and str(error).startswith("NOGROUP")


def _pack_command(_connection: Any, *words: Any) -> list[bytes]:
    """Pack a command with hiredis, which redis-py does in its synchronous connections only.

    EMIT has three arguments per token; packing them in Python took half of the worker's event loop.
    """
    name, *arguments = words
    return [hiredis.pack_command((*name.split(), *arguments))]  # "SCRIPT LOAD" is two arguments


async def _send_packed_command(connection: Any, command: Any, check_health: bool = True) -> None:
    """Write a command directly, because redis-py creates a task and a timer per command (60 us of a request).

    redis-py still opens the connection and waits for bytes that the socket did not take.

    A closed connection raises ConnectionError. A write on its transport would raise RuntimeError in uvloop
    (MagicStack/uvloop#506) and TypeError in CPython (redis/redis-py#4287). CPython 3.12 would also watch the closed
    socket's descriptor, which the next socket reuses.
    """
    transport = connection._writer.transport if connection.is_connected else None
    try:
        if transport is not None and transport.is_closing():
            raise ConnectionError("the connection was closed before the command was written")
        if transport is not None and isinstance(command, list) and not connection.health_check_interval:
            connection._writer.writelines(command)
            command = []
            if not transport.get_write_buffer_size() and not transport.is_closing():
                return
        await AbstractConnection.send_packed_command(connection, command, check_health)
    except (ConnectionError, RuntimeError, TypeError) as error:
        if transport is None or not transport.is_closing():
            raise
        await connection.disconnect(nowait=True)
        raise ConnectionError(f"the connection was closed while a command was written: {error}") from error


class _TcpConnection(Connection):
    pack_command = _pack_command
    send_packed_command = _send_packed_command


class _TlsConnection(SSLConnection):
    pack_command = _pack_command
    send_packed_command = _send_packed_command


class _UnixConnection(UnixDomainSocketConnection):
    pack_command = _pack_command
    send_packed_command = _send_packed_command


_FAST_CONNECTIONS: dict[type[Any], type[Any]] = {
    Connection: _TcpConnection,
    SSLConnection: _TlsConnection,
    UnixDomainSocketConnection: _UnixConnection,
}


class _CommandPool(BlockingConnectionPool):
    """A pool that returns a free connection without redis-py's lock, condition, and timer (a third of a command).

    Callers that find no free connection wait in order, as in redis-py's pool.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._num_waiting = 0

    async def get_connection(self, *names: Any, **options: Any) -> AbstractConnection:
        if self._available_connections and not self._num_waiting:
            connection = self._available_connections[-1]
            if connection.is_connected and not await connection.can_read():
                self._available_connections.pop()
                self._in_use_connections.add(connection)
                return connection
        self._num_waiting += 1
        try:
            waited: AbstractConnection = await super().get_connection(*names, **options)  # type: ignore[no-untyped-call]
            return waited
        finally:
            self._num_waiting -= 1

    async def release(self, connection: AbstractConnection) -> None:
        if self._num_waiting or connection.should_reconnect():  # type: ignore[no-untyped-call]
            await super().release(connection)
        else:
            self._in_use_connections.remove(connection)
            self._available_connections.append(connection)


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


class _CommandRedis(Redis):
    on_demoted: Callable[[Exception], None]  # called for errors after which all open connections are useless

    def __init__(self, pool: ConnectionPool, observe: Observe) -> None:
        super().__init__(connection_pool=pool)
        self._observe = observe

    async def execute_command(self, *words: Any, **options: Any) -> Any:
        """Execute a command once, with half the calls of redis-py, whose counters and retries are not used here."""
        started = time.perf_counter()
        failed = True
        try:
            connection = await self.connection_pool.get_connection()  # type: ignore[no-untyped-call]
            try:
                await connection.send_command(*words)
                reply = await self.parse_response(connection, words[0], **options)
            except (ConnectionError, TimeoutError, OSError) as error:
                await connection.disconnect(error=error)
                raise
            finally:
                await self.connection_pool.release(connection)
            failed = False
            return reply
        except (RedisError, OSError) as error:
            if rule_of(error).closes_connections:
                self.on_demoted(error)
            raise
        finally:
            self._observe(words[0], time.perf_counter() - started, failed)


def _not_observed(_command: str, _seconds: float, _failed: bool) -> None:
    pass


def _pool(url: str, pool_class: type[ConnectionPool], max_connections: int, **pool_options: Any) -> ConnectionPool:
    pool = pool_class.from_url(
        url,
        max_connections=max_connections,
        retry=Retry(NoBackoff(), 0),
        socket_timeout=SOCKET_TIMEOUT_SECONDS,
        socket_connect_timeout=SOCKET_TIMEOUT_SECONDS,
        protocol=2,  # one reply shape on every server version
        **pool_options,
    )
    pool.connection_class = _FAST_CONNECTIONS[pool.connection_class]
    return pool
