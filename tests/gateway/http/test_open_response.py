"""Silent and stalled streams, on a clock that the test controls."""

import asyncio
import socket
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from gateway.http import sse
from gateway.http.open_response import MAX_UNSENT_BYTES, PIECE_BYTES, OpenResponse, StreamWatch
from gateway.text.served_model import ServedModel
from shared.messages import TokenEvent
from tests.gateway.conftest import Gateway
from tests.gateway.fake_inference import finish
from tests.patience import PATIENCE_SECONDS


class FakeOpenResponse:
    def __init__(self, last_write_at: float, write_began_at: float | None = None) -> None:
        self.last_write_at = last_write_at
        self.write_began_at = write_began_at
        self.pushed: list[bytes] = []
        self.aborted = False
        self.is_silent = True
        self.is_store_silent = False
        self.keep_alive = b": keep-alive\n\n"

    def push(self, data: bytes) -> bool:
        self.pushed.append(data)
        return True

    def is_cut_off(self) -> bool:
        return self.is_store_silent

    def abort(self) -> None:
        self.aborted = True


def watch(*streams: Any) -> tuple[StreamWatch, list[int]]:
    stalls: list[int] = []
    watching = StreamWatch(10.0, 30.0, lambda: stalls.append(1))
    for stream in streams:
        watching.add(stream)
    return watching, stalls


def test_silent_stream_gets_a_comment() -> None:
    silent, busy = FakeOpenResponse(last_write_at=0.0), FakeOpenResponse(last_write_at=5.0)
    watching, _ = watch(silent, busy)
    watching.look(9.9)
    watching.look(10.0)
    assert (silent.pushed, busy.pushed) == ([b": keep-alive\n\n"], [])


def test_stream_without_its_store_is_closed() -> None:
    kept, other = FakeOpenResponse(last_write_at=5.0), FakeOpenResponse(last_write_at=5.0)
    watching, stalls = watch(kept, other)
    watching.look(6.0)
    assert not kept.aborted
    kept.is_store_silent = True
    watching.look(6.5)
    assert (kept.aborted, other.aborted, stalls) == (True, False, [])


def test_client_that_reads_nothing_is_dropped_once() -> None:
    stalled, slow = FakeOpenResponse(0.0, write_began_at=0.0), FakeOpenResponse(1.0, write_began_at=1.0)
    watching, stalls = watch(stalled, slow)
    watching.look(30.0)
    watching.look(30.5)
    assert (stalled.aborted, slow.aborted, stalls) == (True, False, [1])
    assert stalled.pushed == slow.pushed == []


class FullTransport:
    """A transport with a client that does not read; `waiting` bytes are in the process's own buffer."""

    def __init__(self, waiting: int) -> None:
        self.waiting = waiting
        self.aborted = False

    def is_closing(self) -> bool:
        return False

    def write(self, data: bytes) -> None:
        self.waiting += len(data)

    def get_write_buffer_size(self) -> int:
        return self.waiting

    def abort(self) -> None:
        self.aborted = True


def test_comment_does_not_stall_an_idle_stream() -> None:
    """The answer's task would wait for the client and notice that it caught up; the watch does not."""
    stream = OpenResponse(None, web.StreamResponse(), StreamWatch(10.0, 30.0), sse.KEEP_ALIVE)  # type: ignore[arg-type]
    transport = FullTransport(waiting=60)
    stream._transport, stream._max_waiting_bytes, stream.last_write_at = transport, 64, 0.0  # type: ignore[assignment]
    watching, stalls = watch(stream)
    watching.look(10.0)  # a comment of 14 bytes would exceed the limit
    transport.waiting = 0  # the client has caught up
    watching.look(20.0)
    assert transport.waiting > 0  # and gets a comment again
    transport.waiting = 0
    watching.look(60.0)
    assert (transport.aborted, stalls) == (False, [])


async def test_waiting_request_gets_comments(start_gateway: Any, tiny_model: ServedModel) -> None:
    gateway: Gateway = await start_gateway(sse_keep_alive_seconds=0.001)
    body = {"prompt": "a", "stream": True}
    async with gateway.session.post("/v1/completions", json=body) as response:
        stream = await gateway.engine.next_stream()
        assert await response.content.readuntil(b"\n\n") == b": keep-alive\n\n"
        stream.send(TokenEvent(stream.request.request_id, 0, tiny_model.encoder.encode_text("a")))
        stream.send(finish(stream.request, 1))
        assert (await response.text()).endswith("data: [DONE]\n\n")


async def test_client_that_stops_reading_is_aborted_and_cancelled(start_gateway: Any, tiny_model: ServedModel) -> None:
    gateway: Gateway = await start_gateway(write_stall_seconds=0.001)
    body = {"prompt": "a", "stream": True}
    async with gateway.session.post("/v1/completions", json=body) as response:
        stream = await gateway.engine.next_stream()
        token_ids = tiny_model.encoder.encode_text("a") * 100_000  # more than both sockets hold

        async def flood() -> None:
            index = 0
            while not gateway.engine.cancelled:
                stream.send(TokenEvent(stream.request.request_id, index, token_ids))
                index += len(token_ids)
                await asyncio.sleep(0.01)

        async with asyncio.timeout(PATIENCE_SECONDS):
            await flood()
        response.close()
    assert gateway.metric("pagestream_gateway_write_stalls_total") == 1


async def test_unread_stream_has_little_written() -> None:
    """Keep the kernel from taking 4 MiB, and the gateway from writing as much, per unread stream."""
    written = asyncio.get_running_loop().create_future()

    async def endless(request: web.Request) -> web.StreamResponse:
        stream = OpenResponse(request, web.StreamResponse(headers=sse.HEADERS), StreamWatch(10.0, 30.0))
        await stream.open()
        num_bytes = 0
        while num_bytes < 16 * MAX_UNSENT_BYTES and stream.push(bytes(1000)):
            num_bytes += 1000
            await asyncio.sleep(0)
        written.set_result(num_bytes)
        stream.abort()
        return stream.response

    app = web.Application()
    app.router.add_get("/", endless)
    async with TestServer(app) as server:
        assert server.port is not None
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # set before connecting, or it has no effect
            client.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(client, ("127.0.0.1", server.port))
            await loop.sock_sendall(client, b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
            # Unsent bytes, as many in the process, and those in transit.
            assert await written <= 3 * MAX_UNSENT_BYTES


async def test_long_last_event_is_written_in_pieces() -> None:
    """Let others run between two pieces.

    The last event of a response with logprobs has many megabytes, of which a socket takes few.
    """
    written: list[int] = []
    turns, at_turns = [0], list[int]()

    def turn() -> None:
        turns[0] += 1
        asyncio.get_running_loop().call_soon(turn)

    class Watched(OpenResponse):
        async def write(self, data: bytes) -> None:
            written.append(len(data))
            at_turns.append(turns[0])
            await super().write(data)

    async def long(request: web.Request) -> web.StreamResponse:
        stream = Watched(request, web.StreamResponse(headers=sse.HEADERS), StreamWatch(10.0, 30.0))
        await stream.open()
        turn()
        await stream.end(bytes(range(256)) * ((3 * PIECE_BYTES + 512) // 256))
        return stream.response

    app = web.Application()
    app.router.add_get("/", long)
    async with TestServer(app) as server, TestClient[web.Request, web.Application](server) as client:
        data = await (await client.get("/")).read()
    assert data == bytes(range(256)) * ((3 * PIECE_BYTES + 512) // 256)
    assert written == [PIECE_BYTES] * 3
    assert len(set(at_turns)) == 3
