"""One pipelined connection to the store for short commands and scripts.

Each command is written at once, and replies arrive in the order of the commands. A transport error is a
ConnectionError or TimeoutError of redis-py: all commands without a reply fail with it, and the next command reconnects.
Nothing is repeated. Do not use it for blocking reads or subscriptions.
"""

import asyncio
import socket
import ssl
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, cast

import hiredis
from redis.asyncio.connection import (
    ConnectionPool,
    DefaultParser,
    SSLConnection,
    UnixDomainSocketConnection,
)
from redis.exceptions import ConnectionError, InvalidResponse, RedisError, TimeoutError

_NOT_COMPLETE = object()
_RESET = "the connection was reset"

FindPrimary = Callable[[], Awaitable[tuple[str, int]]]  # returns host and port; raises ConnectionError


@dataclass(frozen=True, slots=True)
class Address:
    """Where the store is, and how a new connection begins."""

    path: str  # of a unix socket; empty: TCP
    host: str
    port: int
    tls: ssl.SSLContext | None
    keepalive: tuple[tuple[int, int, int], ...]  # options of a TCP socket
    greeting: tuple[tuple[Any, ...], ...]  # AUTH and SELECT
    find_primary: FindPrimary | None = None  # replaces `host` and `port`

    @classmethod
    def of(cls, pool: ConnectionPool, find_primary: FindPrimary | None = None) -> "Address":
        """Return the address of the pool's connections, which redis-py has read from a URL."""
        sample: Any = pool.make_connection()  # type: ignore[no-untyped-call]
        greeting: list[tuple[Any, ...]] = []
        if sample.username or sample.password:
            credentials = (sample.username, sample.password or "") if sample.username else (sample.password,)
            greeting.append(("AUTH", *credentials))
        if sample.db:
            greeting.append(("SELECT", sample.db))
        if isinstance(sample, UnixDomainSocketConnection):
            return cls(sample.path, "", 0, None, (), tuple(greeting))
        tls = sample.ssl_context.get() if isinstance(sample, SSLConnection) else None
        keepalive = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, int(sample.socket_keepalive))]
        keepalive += [(socket.SOL_TCP, option, value) for option, value in sample.socket_keepalive_options.items()]
        return cls("", sample.host, sample.port, tls, tuple(keepalive), tuple(greeting), find_primary)

    async def connect(self, protocol: asyncio.Protocol) -> None:
        loop = asyncio.get_running_loop()
        if self.path:
            await loop.create_unix_connection(lambda: protocol, self.path)
            return
        host, port = (self.host, self.port) if self.find_primary is None else await self.find_primary()
        transport, _ = await loop.create_connection(lambda: protocol, host, port, ssl=self.tls)
        for option in self.keepalive:
            transport.get_extra_info("socket").setsockopt(*option)

    def __str__(self) -> str:
        return "the primary" if self.find_primary else self.path or f"{self.host}:{self.port}"


def check_is_primary(role: Any) -> None:
    """Raise ConnectionError unless `role`, the reply of ROLE, is that of a primary: who reported it may be late."""
    if role[0] != b"master":
        raise ConnectionError("the reported address is not, or not yet, that of a primary")


class CommandConnection:
    """The current connection to an address; it connects on first use, and again after each loss."""

    def __init__(self, address: Address, timeout_seconds: float) -> None:
        self._address = address
        self._timeout_seconds = timeout_seconds  # of a connect, and of each reply
        self._open: _Pipeline | None = None
        self._opening: asyncio.Task[_Pipeline] | None = None

    async def execute(self, words: tuple[Any, ...]) -> Any:
        """Send a command once and return its reply.

        Raises:
            ConnectionError: If the connection fails; the command may have been applied.
            TimeoutError: If there is no reply in time.
            RedisError: If the reply is an error.
        """
        pipeline = self._open
        if pipeline is None or pipeline.is_closing():
            pipeline = await self._connected()
        return await pipeline.send(words)

    def close(self) -> None:
        """Close the connection. Its commands fail; the next one reconnects."""
        if self._opening is not None:
            self._opening.cancel()
        if self._open is not None:
            self._open.close(ConnectionError(_RESET))

    async def _connected(self) -> "_Pipeline":
        """Return an open connection. Concurrent callers share one attempt and its error."""
        if self._opening is None:
            self._opening = asyncio.create_task(self._connect())
            self._opening.add_done_callback(self._opened)
        opening = self._opening
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if not opening.cancelled() or (caller is not None and caller.cancelling()):
                raise
            raise ConnectionError(_RESET) from None  # close() came before the attempt began

    def _opened(self, opening: "asyncio.Task[_Pipeline]") -> None:
        self._opening = None
        if not opening.cancelled() and opening.exception() is None:
            self._open = opening.result()

    async def _connect(self) -> "_Pipeline":
        pipeline = _Pipeline(self._timeout_seconds)
        try:
            async with asyncio.timeout(self._timeout_seconds):
                await self._address.connect(pipeline)
                for command in self._address.greeting:
                    await pipeline.send(command)
                if self._address.find_primary is not None:
                    check_is_primary(await pipeline.send(("ROLE",)))
        except RedisError as error:
            pipeline.close(error)
            raise
        except (Exception, asyncio.CancelledError) as error:  # cancelled by close()
            failure = _failed(f"connecting to {self._address}", error)
            pipeline.close(failure)
            raise failure from error
        return pipeline


class _Pipeline(asyncio.Protocol):
    """Sends commands, and gives each its reply in order."""

    def __init__(self, timeout_seconds: float) -> None:
        self._timeout_seconds = timeout_seconds
        self._loop = asyncio.get_running_loop()
        self._replies = hiredis.Reader(
            protocolError=InvalidResponse, replyError=DefaultParser.parse_error, notEnoughData=_NOT_COMPLETE
        )
        self._waiting: deque[tuple[float, asyncio.Future[Any]]] = deque()  # with the time at which it times out
        self._transport: asyncio.WriteTransport | None = None
        self._error: Exception = ConnectionError("the store closed the connection")  # of commands without a reply
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)  # uvloop's is no subclass

    def is_closing(self) -> bool:
        """Return whether a command written now would be lost."""
        return self._transport is None or self._transport.is_closing()

    def send(self, words: tuple[Any, ...]) -> "asyncio.Future[Any]":
        reply = self._loop.create_future()
        if self._transport is None or self._transport.is_closing():
            reply.set_exception(self._error)
            return reply
        self._transport.write(hiredis.pack_command(words))
        ends_at = self._loop.time() + self._timeout_seconds
        self._waiting.append((ends_at, reply))
        if self._timer is None:
            self._timer = self._loop.call_at(ends_at, self._check_time)
        return reply

    def data_received(self, data: bytes) -> None:
        self._replies.feed(data)
        try:
            while (reply := self._replies.gets()) is not _NOT_COMPLETE:
                _, future = self._waiting.popleft()
                if future.done():  # its caller was cancelled
                    continue
                if isinstance(reply, Exception):
                    future.set_exception(reply)
                else:
                    future.set_result(reply)
        except (InvalidResponse, IndexError) as error:  # IndexError: a reply without a command
            self.close(ConnectionError(f"the store sent what is not a reply: {error}"))

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        if error is not None:
            self._error = _failed("reading a reply", error)
        self._fail_all()

    def close(self, error: Exception) -> None:
        """Close the connection; commands without a reply raise `error`."""
        self._error = error
        if self._transport is not None:
            self._transport.abort()
        self._fail_all()

    def _fail_all(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._waiting:
            _, future = self._waiting.popleft()
            if not future.done():
                future.set_exception(self._error)

    def _check_time(self) -> None:
        self._timer = None
        if not self._waiting:
            return
        ends_at, _ = self._waiting[0]
        if self._loop.time() >= ends_at:
            self.close(TimeoutError(f"no reply within {self._timeout_seconds} s"))
        else:
            self._timer = self._loop.call_at(ends_at, self._check_time)


def _failed(doing: str, error: BaseException) -> Exception:
    text = f"{doing}: {str(error) or type(error).__name__}"
    return TimeoutError(text) if isinstance(error, asyncio.TimeoutError) else ConnectionError(text)
