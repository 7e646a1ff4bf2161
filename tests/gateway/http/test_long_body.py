"""Long bodies arrive whole at clients that read, and take little memory for clients that do not."""

import asyncio
import logging
import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

import aiohttp
import pytest
from aiohttp import web

from gateway.app import RUNNER_OPTIONS
from gateway.http.long_body import write_long
from gateway.http.open_response import MAX_UNSENT_BYTES, PIECE_BYTES, OpenResponse, StreamWatch
from tests.patience import PATIENCE_SECONDS

BODY = bytes(range(256)) * 2**15  # 8 MiB
STALL_SECONDS = 30.0


class Server:
    def __init__(self) -> None:
        self.stalls: list[float] = []
        self.watch = StreamWatch(10.0, STALL_SECONDS, lambda: self.stalls.append(STALL_SECONDS))
        self.transports: list[asyncio.WriteTransport] = []
        self.ends: list[BaseException | None] = []
        self.port = 0
        self.held: list[int] = []

    @contextmanager
    def hold(self, num_bytes: int) -> Iterator[None]:
        self.held.append(num_bytes)
        yield
        self.held.append(-num_bytes)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        self.transports.append(request.transport)
        try:
            answer = web.Response(body=BODY, status=201, headers={"X": "y"})
            response = await write_long(request, answer, self.watch, self.hold)
        except BaseException as error:
            self.ends.append(error)
            raise
        self.ends.append(None)
        return response


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    made, app = Server(), web.Application()
    app.router.add_get("/", made.answer)
    runner = web.AppRunner(app, **RUNNER_OPTIONS)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    made.port = runner.addresses[0][1]
    yield made
    await runner.cleanup()


async def test_reading_client_gets_the_whole_body(server: Server) -> None:
    async with aiohttp.ClientSession(f"http://127.0.0.1:{server.port}") as session:
        for _ in range(2):  # on one connection
            async with session.get("/") as reply:
                assert (reply.status, reply.headers["X"], reply.content_length) == (201, "y", len(BODY))
                assert await reply.read() == BODY
        async with session.head("/") as reply:
            assert (reply.status, reply.content_length) == (201, len(BODY))
    server.watch.look(time.monotonic() + STALL_SECONDS)
    assert (server.ends, server.stalls) == ([None] * 3, [])
    assert server.held == [len(BODY), -len(BODY)] * 2


async def test_long_body_yields_between_pieces(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Yield even if the client never blocks: a write alone is no pause."""
    loop, turns, seen = asyncio.get_running_loop(), [0], list[int]()
    push = OpenResponse.push

    def counted(response: OpenResponse, data: bytes) -> bool:
        seen.append(turns[0])
        return push(response, data)

    def turn() -> None:
        turns[0] += 1
        loop.call_soon(turn)

    monkeypatch.setattr(OpenResponse, "push", counted)
    loop.call_soon(turn)
    async with aiohttp.ClientSession(f"http://127.0.0.1:{server.port}") as session, session.get("/") as reply:
        assert await reply.read() == BODY
    assert len(seen) == len(set(seen)) == len(BODY) // PIECE_BYTES - 1  # the last piece ends the response


async def test_unread_long_body_is_dropped_and_holds_little(server: Server) -> None:
    loop = asyncio.get_running_loop()
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # set before connecting, or it has no effect
        client.setblocking(False)
        await loop.sock_connect(client, ("127.0.0.1", server.port))
        await loop.sock_sendall(client, b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not (server.transports and server.transports[0].get_write_buffer_size() > 0):
                await asyncio.sleep(0.01)
            assert server.transports[0].get_write_buffer_size() <= MAX_UNSENT_BYTES + PIECE_BYTES
            server.watch.look(time.monotonic() + STALL_SECONDS + 1)
            while not server.ends:
                await asyncio.sleep(0.01)
    assert server.stalls == [STALL_SECONDS]
    assert isinstance(server.ends[0], (ConnectionResetError, asyncio.CancelledError))


async def test_client_that_leaves_during_a_long_body_logs_no_error(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
    await reader.readexactly(PIECE_BYTES)
    server.transports[0].close()  # the client has reset the connection, and the handler is not cancelled yet
    writer.transport.abort()
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not server.ends:
            await asyncio.sleep(0.01)
    assert isinstance(server.ends[0], (ConnectionResetError, asyncio.CancelledError))
    await asyncio.sleep(0)  # aiohttp logs after the handler
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []
