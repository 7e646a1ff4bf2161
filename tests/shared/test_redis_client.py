"""The store client on a real server: observed commands, few calls and no task per command, timeouts, connections."""

import asyncio
import sys
from contextlib import suppress
from types import FrameType
from typing import Any

import pytest
from redis.exceptions import AuthenticationError, ConnectionError, ResponseError, TimeoutError

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


async def test_commands_on_lost_connection_raise(valkey: Valkey) -> None:
    connections = connect(valkey.url)
    try:
        await connections.commands.set("x", "text")
        calls = [asyncio.ensure_future(connections.commands.get("x")) for _ in range(3)]
        await asyncio.sleep(0)  # lets them be sent
        await connections.reset()
        for call in calls:
            with pytest.raises(ConnectionError):
                await call
        assert await connections.commands.get("x") == b"text"  # on another connection
    finally:
        await connections.aclose()


async def test_command_takes_few_python_calls(valkey: Valkey) -> None:
    """Plain redis-py makes 183 calls, a tenth of a gateway's work per request. This client makes 37."""
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
    assert calls <= 45


async def test_concurrent_commands_share_one_connection_in_order(valkey: Valkey) -> None:
    connections = connect(valkey.url)
    served: list[int] = []

    async def call(number: int) -> None:
        assert await connections.commands.echo(str(number)) == str(number).encode()
        served.append(number)

    try:
        for _ in range(2):  # also with the connection already open
            served.clear()
            async with asyncio.TaskGroup() as tasks:
                calls = [tasks.create_task(call(number)) for number in range(12)]
                await asyncio.sleep(0)
                calls[5].cancel()
            assert served == [number for number in range(12) if number != 5]
        assert len(await connections.commands.client_list()) == 1
    finally:
        await connections.aclose()


async def test_reset_before_connect_fails_commands_without_cancelling_them(valkey: Valkey) -> None:
    connections, faults = connect(valkey.url), list[dict[str, Any]]()
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: faults.append(context))
    try:
        for leave in (False, True):
            call = asyncio.create_task(connections.commands.execute_command("PING"))
            asyncio.get_running_loop().call_soon(connections.commands.connection_of_commands.close)
            if leave:
                asyncio.get_running_loop().call_soon(call.cancel)
            with pytest.raises(asyncio.CancelledError if leave else ConnectionError):
                await call
        assert await connections.commands.ping() and faults == []
    finally:
        await connections.aclose()


async def test_failed_connect_is_one_attempt_of_all_callers() -> None:
    num_accepted = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_accepted
        num_accepted += 1
        await reader.readuntil(b"AUTH")
        writer.write(b"-WRONGPASS invalid username-password pair or user is disabled.\r\n")
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        connections = connect(f"redis://user:secret@{host}:{port}/3")
        try:
            calls = [asyncio.ensure_future(connections.commands.get("x")) for _ in range(5)]
            for call in calls:
                with pytest.raises(AuthenticationError):
                    await call
            assert num_accepted == 1
        finally:
            await connections.aclose()


@pytest.mark.parametrize("reply", [b"+PONG\r\n+PONG\r\n", b"?\r\n"])
async def test_reply_out_of_protocol_closes_connection(reply: bytes) -> None:
    closed = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"PING")
        writer.write(reply)
        with suppress(ConnectionResetError):
            await reader.read()  # until the client closes
        writer.close()
        closed.set()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        connections = connect(f"redis://{host}:{port}")
        with suppress(ConnectionError):
            await connections.commands.ping()
        await closed.wait()
        await connections.aclose()


async def test_cancelled_command_reply_is_not_read_by_next(valkey: Valkey) -> None:
    connections = connect(valkey.url)
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
    connections, other = connect(valkey.url), connect(valkey.url)
    try:
        await connections.commands.set("x", "text")
        number = await connections.commands.client_id()
        await other.commands.client_kill_filter(_id=str(number))
        await asyncio.sleep(0.05)  # the close of a unix socket arrives at once
        assert await connections.commands.get("x") == b"text"
        assert await connections.commands.client_id() != number
    finally:
        await connections.aclose()
        await other.aclose()
