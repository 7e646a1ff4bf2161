"""Listening sockets that serve a few new connections per iteration of the event loop, and probes first.

asyncio and uvloop give all waiting connections their transport and protocol at once. A burst of 2,000 would hold up
every stream meanwhile. Here a connection first costs only a descriptor. When its first bytes are there, it waits for
its turn, unless they ask for a probe: a load balancer must not take a busy gateway for a dead one.
"""

import asyncio
import errno
import logging
import socket
from collections import deque
from collections.abc import Callable

ACCEPTS_PER_ITERATION = 256  # about 3 ms of the loop
MIN_CONNECTS, MAX_CONNECTS = 4, 16  # per iteration; 16 take about 2 ms, and more for their requests
LONG_ITERATION_SECONDS = 0.008  # then fewer connect: each may bring 256 KiB of a body, which take 0.7 ms
PROBES = (b"GET /livez", b"GET /readyz")
PAUSE_SECONDS = 1.0  # without descriptors or memory, as in asyncio
_PROBE_BYTES = max(map(len, PROBES))
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

logger = logging.getLogger("gateway")


class Listener:
    """The sockets of one address. Create it with listen()."""

    def __init__(self, sockets: list[socket.socket], protocol: Callable[[], asyncio.Protocol]) -> None:
        self._sockets = sockets
        self._protocol = protocol
        self._loop = asyncio.get_running_loop()
        self._silent: set[socket.socket] = set()  # accepted, without a byte so far
        self._waiting: deque[socket.socket] = deque()  # with a request, until their turn
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
        for connection in self._silent:
            self._loop.remove_reader(connection)
        for connection in (*self._silent, *self._waiting):
            self._begin(connection)
        self._silent.clear()
        self._waiting.clear()
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
            self._look(connection)

    def _speaks(self, connection: socket.socket) -> None:
        self._loop.remove_reader(connection)
        self._silent.discard(connection)
        self._look(connection)

    def _look(self, connection: socket.socket) -> None:
        """Begin with a probe, queue a connection with other bytes or an end, and wait for the first byte of others."""
        try:
            is_probe = connection.recv(_PROBE_BYTES, socket.MSG_PEEK).startswith(PROBES)
        except BlockingIOError:
            self._silent.add(connection)
            self._loop.add_reader(connection, self._speaks, connection)
            return
        except OSError:  # closed by the client meanwhile
            connection.close()
            return
        if is_probe:
            self._begin(connection)
            return
        self._waiting.append(connection)
        if len(self._waiting) == 1:
            self._loop.call_soon(self._begin_some, MIN_CONNECTS)

    def _begin_some(self, most: int) -> None:
        for _ in range(min(most, len(self._waiting))):
            self._begin(self._waiting.popleft())
        if self._waiting:
            self._loop.call_soon(self._begin_next, most, self._loop.time())

    def _begin_next(self, last: int, began_at: float) -> None:
        """Begin fewer connections than the `last` ones if the iteration with these was long, else more."""
        is_long = self._loop.time() - began_at > LONG_ITERATION_SECONDS
        self._begin_some(max(MIN_CONNECTS, last // 2) if is_long else min(MAX_CONNECTS, last * 2))

    def _begin(self, connection: socket.socket) -> None:
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
