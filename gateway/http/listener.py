"""Listening sockets that begin and end a few connections per iteration of the event loop, and serve probes first.

asyncio and uvloop give all waiting connections their transport and protocol at once. A burst of 2,000 would hold up
every stream meanwhile. Here a connection first costs only a descriptor. When its first bytes are there, it waits for
its turn, unless they ask for a probe: a load balancer must not take a busy gateway for a dead one. The requests of
2,000 clients that disconnect at once end in turns, too.
"""

import asyncio
import errno
import logging
import socket
from collections.abc import Callable
from functools import partial

from gateway.http.turns import Turns

ACCEPTS_PER_ITERATION = 256  # about 3 ms of the loop
MIN_CONNECTS, MAX_CONNECTS = 2, 16  # each takes 0.1 ms and its request more: 256 KiB of a body 0.7 ms
MIN_ENDS, MAX_ENDS = 4, 64  # of connections; to cancel a stream takes about 0.1 ms
PROBES = (b"GET /livez", b"GET /readyz")
PAUSE_SECONDS = 1.0  # without descriptors or memory, as in asyncio
_PROBE_BYTES = max(map(len, PROBES))
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

logger = logging.getLogger("gateway")


class _Connection(asyncio.Protocol):
    """A connection whose loss reaches its protocol in a turn."""

    def __init__(self, protocol: asyncio.Protocol, ends: Turns) -> None:
        self._protocol, self._ends = protocol, ends

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._protocol.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        self._protocol.data_received(data)

    def eof_received(self) -> bool | None:
        return self._protocol.eof_received()

    def pause_writing(self) -> None:
        self._protocol.pause_writing()

    def resume_writing(self) -> None:
        self._protocol.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._ends.add(partial(self._protocol.connection_lost, exc))


class Listener:
    """The sockets of one address. Create it with listen()."""

    def __init__(self, sockets: list[socket.socket], protocol: Callable[[], asyncio.Protocol]) -> None:
        self._sockets = sockets
        self._protocol = protocol
        self._loop = asyncio.get_running_loop()
        self._silent: set[socket.socket] = set()  # accepted, without a byte so far
        self._begins = Turns(MIN_CONNECTS, MAX_CONNECTS)  # of connections with a request
        self._ends = Turns(MIN_ENDS, MAX_ENDS)
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
            self._begin(connection)
        self._silent.clear()
        self._begins.run_all()
        self._ends.run_all()
        await asyncio.sleep(0)  # they run
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
        else:
            self._begins.add(partial(self._begin, connection))

    def _begin(self, connection: socket.socket) -> None:
        task = self._loop.create_task(self._connect(connection))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    async def _connect(self, connection: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self._new, connection)
        except OSError as error:  # closed by the client meanwhile
            logger.debug("connection: %s", error)
            connection.close()

    def _new(self) -> _Connection:
        return _Connection(self._protocol(), self._ends)

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
