"""The listener begins and ends few connections per iteration of the event loop, all in the end, and probes first."""

import asyncio
import contextlib
import errno
import socket
from typing import cast

import pytest

from gateway.http import listener as listening
from gateway.http import turns
from gateway.http.listener import MAX_CONNECTS, MAX_ENDS, MIN_CONNECTS, Listener, listen


class Greeter(asyncio.Protocol):
    """Answers the first bytes."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)  # uvloop's is no subclass

    def data_received(self, _data: bytes) -> None:
        self._transport.write(b"hello")
        self._transport.close()


async def greeting_of(address: tuple[str, int]) -> bytes:
    reader, writer = await asyncio.open_connection(*address)
    writer.write(b"GET /")
    try:
        return await reader.read()
    finally:
        writer.close()


class Served:
    """Makes protocols that record the first bytes of each connection, in order."""

    def __init__(self) -> None:
        self.num_made = self.num_lost = 0
        self.heads: list[bytes] = []
        self.transports: list[asyncio.WriteTransport] = []

    def __call__(self) -> asyncio.Protocol:
        self.num_made += 1
        return Recorder(self)

    async def close(self) -> None:
        while len(self.transports) < self.num_made:
            await asyncio.sleep(0)
        for transport in self.transports:
            transport.abort()
        await asyncio.sleep(0)  # lets the transports close their sockets


class Recorder(asyncio.Protocol):
    def __init__(self, served: Served) -> None:
        self._served = served

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._served.transports.append(cast(asyncio.WriteTransport, transport))

    def data_received(self, data: bytes) -> None:
        self._served.heads.append(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._served.num_lost += 1


def connections(address: tuple[str, int], *heads: bytes) -> contextlib.ExitStack:
    """Open a connection for each head, and send it. The loop does not run meanwhile."""
    with contextlib.ExitStack() as stack:
        for head in heads:
            stack.enter_context(socket.create_connection(address, timeout=5)).sendall(head)
        return stack.pop_all()


async def test_burst_is_served_in_turns() -> None:
    served, largest = Served(), 0
    listener = await listen("127.0.0.1", 0, served, backlog=512)
    with connections(listener.address, *[b"GET /v1/models"] * 200):
        while served.num_made < 200:
            before = served.num_made
            await asyncio.sleep(0)
            largest = max(largest, served.num_made - before)
        await served.close()
    assert 0 < largest <= MAX_CONNECTS
    await listener.close()


async def test_connections_that_are_lost_at_once_end_in_turns() -> None:
    served, largest = Served(), 0
    listener = await listen("127.0.0.1", 0, served, backlog=512)
    with connections(listener.address, *[b"GET /v1/models"] * 200):
        while len(served.heads) < 200:
            await asyncio.sleep(0)
    while served.num_lost < 200:
        before = served.num_lost
        await asyncio.sleep(0)
        largest = max(largest, served.num_lost - before)
    assert 0 < largest <= MAX_ENDS
    await listener.close()


async def test_fewer_connect_while_iterations_are_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "LONG_ITERATION_SECONDS", -1.0)
    served, sizes = Served(), list[int]()
    listener = await listen("127.0.0.1", 0, served, backlog=512)
    with connections(listener.address, *[b"GET /v1/models"] * 40):
        while served.num_made < 40:
            before = served.num_made
            await asyncio.sleep(0)
            sizes.append(served.num_made - before)
        await served.close()
    assert max(sizes) == MIN_CONNECTS
    await listener.close()


@pytest.mark.parametrize("path", [b"/livez", b"/readyz?all=true"])
async def test_probe_overtakes_a_burst(path: bytes) -> None:
    served = Served()
    listener = await listen("127.0.0.1", 0, served, backlog=512)
    probe = b"GET " + path
    with connections(listener.address, *[b"GET /v1/models"] * 400, probe):
        while len(served.heads) < 401:
            await asyncio.sleep(0)
        await served.close()
    assert served.heads.index(probe) < 100
    await listener.close()


async def test_silent_connection_is_served_when_it_speaks_or_the_listener_closes() -> None:
    served = Served()
    listener = await listen("127.0.0.1", 0, served, backlog=512)
    with connections(listener.address, b"", b""):
        await asyncio.sleep(0.05)  # they are accepted meanwhile
        assert served.num_made == 0
        await listener.close()
        assert served.num_made == 2
        await served.close()


async def test_closed_listener_refuses_and_may_be_closed_again() -> None:
    listener = await listen("localhost", 0, Greeter, backlog=8)
    address = listener.address
    assert await greeting_of(address) == b"hello"
    await listener.close()
    await listener.close()
    with pytest.raises(OSError, match=r"Connect call failed|refused"):
        await greeting_of(address)


async def test_port_in_use_is_reported() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(OSError, match="in use"):
        await listen("127.0.0.1", taken.getsockname()[1], Greeter, backlog=8)


class Exhausted(socket.socket):
    """A listening socket whose first accept() finds no descriptor."""

    is_exhausted = True

    def accept(self) -> tuple[socket.socket, object]:
        if self.is_exhausted:
            self.is_exhausted = False
            raise OSError(errno.EMFILE, "Too many open files")
        return super().accept()


async def test_listener_goes_on_after_exhausted_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "PAUSE_SECONDS", 0.01)
    exhausted = Exhausted(socket.AF_INET)
    exhausted.bind(("127.0.0.1", 0))
    exhausted.listen(8)
    listener = Listener([exhausted], Greeter)
    assert await greeting_of(listener.address) == b"hello"
    assert not exhausted.is_exhausted
    await listener.close()
