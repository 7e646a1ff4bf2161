"""Commands as an observer hears of them, and as they are sent: on a real server, and to one that reads nothing."""

import asyncio
import sys
from types import FrameType
from typing import Any

import pytest
from redis.exceptions import ConnectionError, ResponseError, TimeoutError

from shared import redis_client
from shared.redis_client import connect
from tests.conftest import Valkey


async def test_an_observer_hears_of_each_command_and_of_its_failure(valkey: Valkey) -> None:
    heard = []
    connections = connect(valkey.url, observe=lambda command, seconds, failed: heard.append((command, seconds, failed)))
    try:
        await connections.commands.set("x", "text")
        with pytest.raises(ResponseError):
            await connections.commands.incr("x")
    finally:
        await connections.aclose()
    assert [(command, failed) for command, _, failed in heard] == [("SET", False), ("INCRBY", True)]
    assert all(0 < seconds < 10 for _, seconds, _ in heard)


async def test_a_command_makes_no_task(valkey: Valkey) -> None:
    """redis-py sends each in a task of its own, with a timer: they are the dearest part of a request's only command."""
    loop, made = asyncio.get_running_loop(), list[Any]()

    def make(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
        made.append(coroutine)
        return asyncio.Task(coroutine, loop=loop, **options)

    connections = connect(valkey.url)
    try:
        await connections.commands.set("x", b"text")  # on an open connection now
        loop.set_task_factory(make)
        await connections.commands.set("x", b"y" * 100_000)
        assert await connections.commands.get("x") == b"y" * 100_000
        assert made == []
    finally:
        loop.set_task_factory(None)
        await connections.aclose()


async def test_what_a_server_does_not_read_is_waited_for_no_longer_than_its_time_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(redis_client, "SOCKET_TIMEOUT_SECONDS", 0.5)
    held = list[asyncio.StreamWriter]()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        held.append(writer)
        for _ in range(2):  # the client says who it is; nothing after that is read
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


async def test_a_connection_that_was_lost_is_no_reply(valkey: Valkey) -> None:
    connections = connect(valkey.url)
    try:
        await connections.commands.set("x", "text")
        (connection,) = connections.commands.connection_pool._available_connections
        assert connection._writer
        connection._writer.transport.abort()
        with pytest.raises(ConnectionError):
            await connection.send_command("GET", "x")
        assert await connections.commands.get("x") == b"text"  # on another one
    finally:
        await connections.aclose()


async def test_a_command_is_few_calls(valkey: Valkey) -> None:
    """By itself redis-py makes 183 of one, which is a tenth of all that a request is to a gateway; these are 84."""
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


async def test_more_callers_than_connections_are_served_in_order(valkey: Valkey) -> None:
    connections = connect(valkey.url, max_command_connections=2)
    served: list[int] = []

    async def call(number: int) -> None:
        assert await connections.commands.echo(str(number)) == str(number).encode()
        served.append(number)

    try:
        for _ in range(3):  # also where connections are open already
            served.clear()
            async with asyncio.TaskGroup() as tasks:
                calls = [tasks.create_task(call(number)) for number in range(12)]
                await asyncio.sleep(0)
                calls[5].cancel()  # it waits: its place is the next one's
            assert sorted(served) == [number for number in range(12) if number != 5]
            assert max(abs(number - place) for place, number in enumerate(served)) <= 2
        assert len(await connections.commands.client_list()) == 2
    finally:
        await connections.aclose()


async def test_a_reply_that_nobody_waits_for_is_no_other_commands(valkey: Valkey) -> None:
    connections = connect(valkey.url, max_command_connections=1)
    try:
        await connections.commands.set("x", "text")
        left = asyncio.ensure_future(connections.commands.execute_command("ECHO", "left"))
        await asyncio.sleep(0)  # it is sent
        left.cancel()
        with pytest.raises(asyncio.CancelledError):
            await left
        assert await connections.commands.get("x") == b"text"
    finally:
        await connections.aclose()


async def test_a_connection_that_the_server_has_closed_is_not_used(valkey: Valkey) -> None:
    connections, other = connect(valkey.url, max_command_connections=1), connect(valkey.url)
    try:
        await connections.commands.set("x", "text")
        await other.commands.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        (connection,) = connections.commands.connection_pool._available_connections
        while not await connection.can_read():  # its end has come
            await asyncio.sleep(0.001)
        assert await connections.commands.get("x") == b"text"
    finally:
        await connections.aclose()
        await other.aclose()
