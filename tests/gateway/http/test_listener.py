"""The listener accepts few connections per iteration of the event loop, all in the end, and again after exhaustion."""

import asyncio
import contextlib
import errno
import socket
from typing import cast

import pytest

from gateway.http import listener as listening
from gateway.http.listener import ACCEPTS_PER_ITERATION, Listener, listen


class Greeter(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        writing = cast(asyncio.WriteTransport, transport)  # uvloop's is no subclass
        writing.write(b"hello")
        writing.close()


async def greeting_of(address: tuple[str, int]) -> bytes:
    reader, writer = await asyncio.open_connection(*address)
    try:
        return await reader.read()
    finally:
        writer.close()


async def test_burst_is_accepted_in_turns() -> None:
    num_made, largest = 0, 0

    def make() -> asyncio.Protocol:
        nonlocal num_made
        num_made += 1
        return Greeter()

    listener = await listen("127.0.0.1", 0, make, backlog=512)
    with contextlib.ExitStack() as stack:
        for _ in range(200):  # the loop does not run meanwhile
            stack.enter_context(socket.create_connection(listener.address, timeout=5))
        while num_made < 200:
            before = num_made
            await asyncio.sleep(0)
            largest = max(largest, num_made - before)
    assert 0 < largest <= ACCEPTS_PER_ITERATION
    await listener.close()


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
