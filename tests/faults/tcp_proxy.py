"""A TCP proxy with faults on request: what a network between a process and the store can do."""

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field


@dataclass
class TcpProxy:
    """Use `async with TcpProxy("127.0.0.1", store_port) as proxy:` and connect to `proxy.port`."""

    host: str
    target_port: int
    port: int = 0
    delay_seconds: float = 0.0  # delay before each piece of a reply
    is_silent: bool = False  # half-open: bytes of both directions are dropped, connections stay
    is_down: bool = False  # new connections are closed
    num_swallowed_replies: int = 0
    _to_swallow: int = 0
    _connections: set[asyncio.StreamWriter] = field(default_factory=set)
    _tasks: set["asyncio.Task[None]"] = field(default_factory=set)
    _server: asyncio.Server | None = None

    async def __aenter__(self) -> "TcpProxy":
        self._server = await asyncio.start_server(self._accept, self.host, self.port)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *error: object) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut(self) -> None:
        """Reset every connection."""
        for writer in self._connections:
            writer.transport.abort()

    def swallow_replies(self, count: int) -> None:
        """Drop the next `count` replies, each with its connection, after the store has applied the command."""
        self._to_swallow = count

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self._connections.add(writer)
        try:
            await self._serve(reader, writer)
        finally:
            self._connections.discard(writer)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.is_down:
            with suppress(OSError):  # cut
                await reader.read(1)  # a client that has sent bytes is in the middle of a write
            writer.close()
            return
        try:
            store_reader, store_writer = await asyncio.open_connection(self.host, self.target_port)
        except OSError:
            writer.transport.abort()
            return
        self._connections.add(store_writer)
        pumps = [
            asyncio.create_task(self._pump(reader, store_writer, is_reply=False)),
            asyncio.create_task(self._pump(store_reader, writer, is_reply=True)),
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            for end in (writer, store_writer):
                end.transport.abort()
            self._connections.discard(store_writer)

    async def _pump(self, source: asyncio.StreamReader, target: asyncio.StreamWriter, *, is_reply: bool) -> None:
        while data := await source.read(65536):
            if self.is_silent:
                continue
            if is_reply and self._to_swallow:
                self._to_swallow -= 1
                self.num_swallowed_replies += 1
                return
            if is_reply and self.delay_seconds:
                await asyncio.sleep(self.delay_seconds)
            target.write(data)
            await target.drain()
