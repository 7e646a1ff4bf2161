"""A whole request with the store's connection closed before each write in turn, on both event loops.

Only uvloop raises RuntimeError on a write to a closed transport, so asyncio alone would not expose it.
"""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import uvloop
from redis.asyncio import UnixDomainSocketConnection
from redis.exceptions import ConnectionError

from engine_worker.transport.incarnation import register
from engine_worker.transport.reaper import Reaper
from gateway.store.inbox import Inbox
from gateway.store.inference_client import InferenceClient
from gateway.store.store_calls import StoreUnavailable
from gateway.work.owner_tasks import OwnerTasks
from shared import command_connection, redis_client, store_errors
from shared.messages import FinishEvent, FinishReason, TokenEvent, Usage
from shared.redis_client import RedisConnections, connect
from shared.redis_keys import RedisKeys
from shared.redis_scripts import Demand
from tests.builders import make_request
from tests.conftest import Valkey
from tests.engine_worker.transport.presence import FixedPresence
from tests.inbox_reader import InboxReader
from tests.patience import PATIENCE_SECONDS

LOOPS = [asyncio.new_event_loop, uvloop.new_event_loop]


class Closing:
    """Closes the connection before write number `at`, counted over all connections."""

    def __init__(self, at: int) -> None:
        self.num_writes = 0
        self._at = at

    def before_write(self, transport: asyncio.BaseTransport | None) -> bool:
        """Return whether the transport was closed."""
        self.num_writes += 1
        if self.num_writes != self._at or transport is None:
            return False
        transport.abort()  # type: ignore[attr-defined]
        return True


async def answer(url: str, keys: RedisKeys) -> None:
    """Submit, claim, emit, finish, and read a request with the real components."""
    of_gateway, of_worker = connect(url), connect(url)
    owners = OwnerTasks()
    client = InferenceClient(of_gateway, keys, "g", quiet_seconds=0.02)
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            await client.start(owners)
            incarnation = await register(of_worker, keys, "w")
            stream = await submitted(client)
            while not await incarnation.requests.claim(Demand(1), block=True):
                pass
            for index in range(3):
                await incarnation.tokens.emit([TokenEvent(stream.request_id, index, [5 + index])])
            end = FinishEvent(stream.request_id, FinishReason.STOP, Usage(prompt_tokens=3, completion_tokens=3))
            await incarnation.tokens.finish([end])
            events = [event async for event in InboxReader(stream)]
            tokens = [token for event in events if isinstance(event, TokenEvent) for token in event.token_ids]
            assert tokens == [5, 6, 7] and events[-1] == end
            await Reaper(of_worker, keys, FixedPresence()).tick(could_hear=True)
            await incarnation.requests.hand_back_within(PATIENCE_SECONDS)
        assert not owners.failed.is_set()
    finally:
        await client.close()
        for connections in (of_gateway, of_worker):
            await connections.aclose()
        await asyncio.sleep(0)  # lets the transports report their close to the loop


async def submitted(client: InferenceClient) -> Inbox:
    while True:
        try:
            return await client.submission.submit(make_request(3))
        except StoreUnavailable:  # a client retries after 503
            pass


@pytest.mark.parametrize("new_loop", LOOPS)
def test_request_survives_connection_closed_before_any_write(
    valkey: Valkey, monkeypatch: pytest.MonkeyPatch, new_loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    monkeypatch.setattr(store_errors, "MIN_BACKOFF_SECONDS", 0.001)
    monkeypatch.setattr("gateway.store.recovery.TICK_SECONDS", 0.02)
    monkeypatch.setattr("engine_worker.transport.request_stream.BLOCK_SECONDS", 0.02)
    connection_class = redis_client._CONNECTION_CLASSES[UnixDomainSocketConnection]
    send_of_redis_py, send_of_commands = connection_class.send_packed_command, command_connection._Pipeline.send

    def run(number: int) -> int:
        closing = Closing(number)

        async def send(connection: Any, *arguments: Any, **options: Any) -> None:
            if closing.before_write(connection._writer and connection._writer.transport):
                await asyncio.sleep(0.001)  # lets the loop run once, so that the transport drops its socket
            await send_of_redis_py(connection, *arguments, **options)

        def send_command(pipeline: Any, words: Any) -> Any:
            closing.before_write(pipeline._transport)
            return send_of_commands(pipeline, words)

        monkeypatch.setattr(connection_class, "send_packed_command", send)
        monkeypatch.setattr(command_connection._Pipeline, "send", send_command)
        with asyncio.Runner(loop_factory=new_loop) as runner:
            runner.run(answer(valkey.url, RedisKeys(f"model-{number}")))
        return closing.num_writes

    num_writes = run(0)
    assert num_writes > 20
    for number in range(1, num_writes + 1):
        run(number)


@pytest.mark.parametrize("new_loop", LOOPS)
@pytest.mark.parametrize("client", ["subscriber", "blocking"])
def test_write_on_closed_transport_raises_connection_error(
    valkey: Valkey, new_loop: Callable[[], asyncio.AbstractEventLoop], client: str
) -> None:
    async def write() -> None:
        connections: RedisConnections = connect(valkey.url)
        redis = getattr(connections, client)
        try:
            connection = await redis.connection_pool.get_connection()
            connection._writer.transport.abort()
            await asyncio.sleep(0.001)  # lets the loop run once, so that the transport drops its socket
            with pytest.raises(ConnectionError):
                await connection.send_command("PING")
            await redis.connection_pool.release(connection)
            assert await redis.ping()
        finally:
            await connections.aclose()

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(write())


async def test_connection_closed_between_check_and_write_is_a_connection_error(valkey: Valkey) -> None:
    """As by a reset while another task subscribes: redis-py has then forgotten its writer."""
    connections = connect(valkey.url)
    connection: Any = connections.subscriber.connection_pool.make_connection()
    await connection.connect()
    sending = asyncio.create_task(connection.send_packed_command([b"PING"], check_health=False))
    await asyncio.sleep(0)  # its check is over; its write is in the next iteration of the loop
    await connection.disconnect(nowait=True)
    with pytest.raises(ConnectionError, match="closed while a command was written"):
        await sending
    await connections.aclose()
