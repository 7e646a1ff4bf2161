"""The store client on a real server: observed commands, few calls and no task per command, timeouts, connections."""

import asyncio
import sys
from types import FrameType
from typing import Any

import pytest
from redis.exceptions import ConnectionError, ResponseError, TimeoutError

from shared import redis_client
from shared.redis_client import connect
from tests.conftest import Valkey


async def test_observer_sees_each_command_and_its_failure(valkey: Valkey) -> None:
    seen = []
    connections = connect(valkey.url, observe=lambda command, seconds, failed: seen.append((command, seconds, failed)))
    try:
        await connections.commands.set("x", "text")
        with pytest.raises(ResponseError):
            await connections.commands.incr("x")
    finally:
        await connections.aclose()
    assert [(command, failed) for command, _, failed in seen] == [("SET", False), ("INCRBY", True)]
    assert all(0 < seconds < 10 for _, seconds, _ in seen)


async def test_command_creates_no_task(valkey: Valkey) -> None:
    """redis-py sends each command in its own task with a timer, which is most of the cost of a single command."""
    loop, made = asyncio.get_running_loop(), list[Any]()

    def make(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
        made.append(coroutine)
        return asyncio.Task(coroutine, loop=loop, **options)

    connections = connect(valkey.url)
    try:
        await connections.commands.set("x", b"text")  # opens the connection
        loop.set_task_factory(make)
        await connections.commands.set("x", b"y" * 100_000)
        assert await connections.commands.get("x") == b"y" * 100_000
        assert made == []
    finally:
        loop.set_task_factory(None)
        await connections.aclose()


async def test_command_unread_by_server_times_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(redis_client, "SOCKET_TIMEOUT_SECONDS", 0.5)
    held = list[asyncio.StreamWriter]()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        held.append(writer)
        for _ in range(2):  # the client identifies itself; nothing after that is read
            await reader.readuntil(b"SETINFO")
            writer.write(b"+OK\r\n")
        writer.transport.pause_reading()  # type: ignore[attr-defined]

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        connections = connect(f"redis://{host}:{port}")
        try:
            with pytest.raises(TimeoutError):
                await connections.commands.set("x", b"y" * 2**26)
        finally:
            await connections.aclose()
            for writer in held:
                writer.close()


async def test_command_on_lost_connection_raises(valkey: Valkey) -> None:
    connections = connect(valkey.url)
    try:
        await connections.commands.set("x", "text")
        (connection,) = connections.commands.connection_pool._available_connections
        assert connection._writer
        connection._writer.transport.abort()
        with pytest.raises(ConnectionError):
            await connection.send_command("GET", "x")
        assert await connections.commands.get("x") == b"text"  # on another connection
    finally:
        await connections.aclose()


async def test_command_takes_few_python_calls(valkey: Valkey) -> None:
    """Plain redis-py makes 183 calls, a tenth of a gateway's work per request. This client makes 84."""
    calls = 0

    def count(frame: FrameType, event: str, _: object) -> None:
        nonlocal calls
        calls += event == "call"

    connections = connect(valkey.url)
    try:
        await connections.commands.get("x")
        sys.setprofile(count)
        await connections.commands.get("x")
    finally:
        sys.setprofile(None)
        await connections.aclose()
    assert calls <= 100


async def test_commands_above_connection_limit_run_in_order(valkey: Valkey) -> None:
    connections = connect(valkey.url, max_command_connections=2)
    served: list[int] = []

    async def call(number: int) -> None:
        assert await connections.commands.echo(str(number)) == str(number).encode()
        served.append(number)

    try:
        for _ in range(3):  # also with connections already open
            served.clear()
            async with asyncio.TaskGroup() as tasks:
                calls = [tasks.create_task(call(number)) for number in range(12)]
                await asyncio.sleep(0)
                calls[5].cancel()  # it waits, so the next command takes its place
            assert sorted(served) == [number for number in range(12) if number != 5]
            assert max(abs(number - place) for place, number in enumerate(served)) <= 2
        assert len(await connections.commands.client_list()) == 2
    finally:
        await connections.aclose()


async def test_cancelled_command_reply_is_not_read_by_next(valkey: Valkey) -> None:
    connections = connect(valkey.url, max_command_connections=1)
    try:
        await connections.commands.set("x", "text")
        left = asyncio.ensure_future(connections.commands.execute_command("ECHO", "left"))
        await asyncio.sleep(0)  # lets the command be sent
        left.cancel()
        with pytest.raises(asyncio.CancelledError):
            await left
        assert await connections.commands.get("x") == b"text"
    finally:
        await connections.aclose()


async def test_connection_closed_by_server_is_not_reused(valkey: Valkey) -> None:
    connections, other = connect(valkey.url, max_command_connections=1), connect(valkey.url)
    try:
        await connections.commands.set("x", "text")
        await other.commands.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        (connection,) = connections.commands.connection_pool._available_connections
        while not await connection.can_read():  # until the close arrives
            await asyncio.sleep(0.001)
        assert await connections.commands.get("x") == b"text"
    finally:
        await connections.aclose()
        await other.aclose()
