"""Connections to Redis or Valkey, with the client's own habits switched off.

Measured with redis-py 8.1: its default repeats any command ten times, so one XADD with three lost replies left four
entries; its default time-out of 5 s breaks longer blocking reads. Here nothing is repeated (only our scripts may be, by
their callers), and blocking reads, subscriptions and commands never share a connection.

It lies under every walk that crosses the store. It knows no key and no script.
"""

import time
from collections.abc import Callable
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
from redis.exceptions import (
    BusyLoadingError,
    ClusterDownError,
    ConnectionError,
    MasterDownError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TimeoutError,
    TryAgainError,
)

SOCKET_TIMEOUT_SECONDS = 10.0
BLOCK_SECONDS = 1.0  # of a blocking read, whose end falls on a tick; far below the socket time-out

# What passes by itself: the server is away, restarting, full, read-only after a failover, or cannot write its AOF.
_NO_REPLY = (ConnectionError, TimeoutError, OSError)
_TRANSIENT_REPLIES = (
    BusyLoadingError,
    ClusterDownError,
    MasterDownError,
    OutOfMemoryError,
    ReadOnlyError,
    TryAgainError,
)


@dataclass(frozen=True, slots=True)
class RedisConnections:
    """Three clients of one server; close them with `aclose()`."""

    commands: Redis  # short commands and scripts; a small pool, so concurrent callers do not wait for one another
    blocking: Redis  # XREADGROUP BLOCK of one reader
    subscriber: Redis  # pub/sub

    async def aclose(self) -> None:
        for client in (self.commands, self.blocking, self.subscriber):
            await client.aclose(close_connection_pool=True)


Observe = Callable[[str, float, bool], None]  # command, seconds until its reply, whether it failed


def connect(
    url: str, *, max_command_connections: int = 8, observe: Observe | None = None, num_models: int = 1
) -> RedisConnections:
    """Open nothing yet: each client connects on first use. `url` is redis://, rediss:// or unix://.

    `observe` hears of each command of `commands`, pipelines excepted. `num_models`: that they are for, each with
    subscriptions and commands of its own.
    """
    max_commands = max_command_connections * num_models
    commands = _pool(url, _CommandPool, max_commands, timeout=SOCKET_TIMEOUT_SECONDS)
    return RedisConnections(
        commands=_CommandRedis(commands, observe or _not_observed),
        blocking=Redis(connection_pool=_pool(url, ConnectionPool, 2)),
        subscriber=Redis(connection_pool=_pool(url, ConnectionPool, 8 * num_models)),
    )


def got_no_reply(error: BaseException) -> bool:
    """The command may or may not have been applied."""
    return isinstance(error, _NO_REPLY) and not isinstance(error, _TRANSIENT_REPLIES)


def is_transient(error: BaseException) -> bool:
    """Worth repeating later (only what is safe to repeat: our scripts and reads)."""
    if isinstance(error, (*_NO_REPLY, *_TRANSIENT_REPLIES)):
        return True
    return isinstance(error, ResponseError) and str(error).startswith("MISCONF")


def is_missing_group(error: RedisError) -> bool:
    """NOGROUP: the store lost its memory (or a model's keys were deleted)."""
    return isinstance(error, ResponseError) and str(error).startswith("NOGROUP")


def _pack_command(_connection: Any, *words: Any) -> list[bytes]:
    """hiredis' packing, which redis-py has for its synchronous connections only: EMIT has three arguments a token, and
    packing them in Python took as long as everything else in the worker's event loop together."""
    name, *arguments = words
    return [hiredis.pack_command((*name.split(), *arguments))]  # "SCRIPT LOAD" is two words of the protocol


async def _send_packed_command(connection: Any, command: Any, check_health: bool = True) -> None:
    """Written at once: redis-py makes a task and a timer for each command, 60 us of a request. What the socket did not
    take, a connection that is closing or not open yet, and health checks, which nobody asks for here, are its own."""
    if connection.is_connected and isinstance(command, list) and not connection.health_check_interval:
        transport = connection._writer.transport
        # asyncio of Python 3.12 would watch the descriptor of a closing socket for room, and so that of the next one.
        if not transport.is_closing():
            connection._writer.writelines(command)
        command = []
        if not transport.get_write_buffer_size() and not transport.is_closing():
            return
    await AbstractConnection.send_packed_command(connection, command, check_health)


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
    """A free connection is handed out at once, and those who find none wait in order, as in redis-py's own: its lock,
    condition and timer around each command are a third of what a command costs."""

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


class _CommandRedis(Redis):
    def __init__(self, pool: ConnectionPool, observe: Observe) -> None:
        super().__init__(connection_pool=pool)
        self._observe = observe

    async def execute_command(self, *words: Any, **options: Any) -> Any:
        """As redis-py does without repeats: in half its calls, for its counters and retries have no use here."""
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
