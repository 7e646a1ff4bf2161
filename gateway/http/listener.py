"""Listening sockets that accept a few connections per iteration of the event loop.

asyncio and uvloop accept all waiting connections at once. A burst of 2,000 would hold up every stream until each of
them has its transport and protocol. Here the others wait in the kernel's backlog.
"""

import asyncio
import errno
import logging
import socket
from collections.abc import Callable

ACCEPTS_PER_ITERATION = 16  # about 2 ms of the loop
PAUSE_SECONDS = 1.0  # without descriptors or memory, as in asyncio
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

logger = logging.getLogger("gateway")


class Listener:
    """The sockets of one address. Create it with listen()."""

    def __init__(self, sockets: list[socket.socket], protocol: Callable[[], asyncio.Protocol]) -> None:
        self._sockets = sockets
        self._protocol = protocol
        self._loop = asyncio.get_running_loop()
        self._connecting: set[asyncio.Task[object]] = set()
        for listening in sockets:
            listening.setblocking(False)
            self._loop.add_reader(listening, self._accept, listening)

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of the first socket."""
        host, port = self._sockets[0].getsockname()[:2]
        return host, port

    async def close(self) -> None:
        """Stop listening, if it was not stopped. Connections in the backlog are refused; accepted ones stay."""
        while self._sockets:
            listening = self._sockets.pop()
            self._loop.remove_reader(listening)
            listening.close()
        await asyncio.gather(*self._connecting, return_exceptions=True)

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(ACCEPTS_PER_ITERATION):
            try:
                connection, _ = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _EXHAUSTED:
                    raise
                logger.error("connections: not accepted for %g s: %s", PAUSE_SECONDS, error)
                self._loop.remove_reader(listening)
                self._loop.call_later(PAUSE_SECONDS, self._resume, listening)
                return
            connection.setblocking(False)
            task = self._loop.create_task(self._connect(connection))
            self._connecting.add(task)
            task.add_done_callback(self._connecting.discard)

    async def _connect(self, connection: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self._protocol, connection)
        except OSError as error:  # closed by the client meanwhile
            logger.debug("connection: %s", error)
            connection.close()

    def _resume(self, listening: socket.socket) -> None:
        if listening.fileno() >= 0:  # not closed
            self._loop.add_reader(listening, self._accept, listening)


async def listen(
    host: str, port: int, protocol: Callable[[], asyncio.Protocol], *, backlog: int, reuse_port: bool = False
) -> Listener:
    """Listen on every address of a host.

    Raises:
        OSError: If an address cannot be used.
    """
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    sockets: list[socket.socket] = []
    try:
        for family, address in dict.fromkeys((family, address) for family, *_, address in found):
            sockets.append(socket.create_server(address[:2], family=family, backlog=backlog, reuse_port=reuse_port))
    except OSError:
        for listening in sockets:
            listening.close()
        raise
    return Listener(sockets, protocol)
