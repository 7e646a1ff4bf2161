"""A RESP proxy in front of a real store; it answers selected commands with a planned fault."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

import hiredis

from shared.tasks import cancel_and_wait

CLOSE = "close"  # closes the connection instead of replying


@dataclass
class RespProxy:
    """A proxy. Use `async with RespProxy("/path/of/socket") as proxy:` and connect to `proxy.url`."""

    socket_path: str
    url: str = ""
    num_faults: int = 0
    num_connections: int = 0  # opened in total
    script_names: Mapping[str, str] = field(default_factory=dict)  # by digest
    _planned: list[tuple[str, str]] = field(default_factory=list)
    _clients: set[asyncio.StreamWriter] = field(default_factory=set)
    _tasks: set["asyncio.Task[None]"] = field(default_factory=set)

    async def __aenter__(self) -> "RespProxy":
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()
        self.url = f"redis://{host}:{port}"
        return self

    async def __aexit__(self, *error: object) -> None:
        self._server.close()
        for writer in self._clients:
            writer.transport.abort()
        await asyncio.gather(*self._tasks)
        await asyncio.sleep(0)  # lets the transports report their close to the loop

    def plan(self, command: str, reply: str, times: int = 1) -> None:
        """Answer the next `times` commands or scripts of this name with the error `reply`, or with CLOSE."""
        self._planned += [(command, reply)] * times

    def forget_plans(self) -> None:
        self._planned.clear()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self.num_connections += 1
        self._clients.add(writer)
        store_reader, store_writer = await asyncio.open_unix_connection(self.socket_path)
        replies = asyncio.create_task(_pass_on(store_reader, writer))
        try:
            await self._serve(reader, store_writer)
        except ConnectionError:
            pass
        finally:
            await cancel_and_wait([replies])
            self._clients.discard(writer)
            for end in (writer, store_writer):
                end.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, store_writer: asyncio.StreamWriter) -> None:
        commands = hiredis.Reader()
        while data := await reader.read(65536):
            commands.feed(data)
            while (command := commands.gets()) is not False:
                fault = self._fault_of(self._name_of(command))
                if fault == CLOSE:
                    return
                if fault:  # the store replies, so that the replies keep their order
                    command = ["EVAL", "return redis.error_reply(ARGV[1])", 0, fault]
                store_writer.write(hiredis.pack_command(tuple(command)))

    def _name_of(self, command: list[bytes]) -> str:
        if command[0] == b"EVALSHA":
            return self.script_names[command[1].decode()]
        return command[0].decode()

    def _fault_of(self, command: str) -> str:
        for plan in self._planned:
            if plan[0] == command:
                self._planned.remove(plan)
                self.num_faults += 1
                return plan[1]
        return ""


async def _pass_on(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    while data := await source.read(65536):
        target.write(data)
