"""A request that is accepted again starts a new journal; tokens of the previous attempt never reach its reader.

The interleavings are forced: a script's reply or a journal's reading waits until the test releases it. Lost messages
(`is_delivered=False`) would otherwise hide that a token has taken the wrong place.
"""

import asyncio
from typing import Any

import pytest

from gateway.store.inbox import Inbox, StreamState
from gateway.store.inference_client import InferenceClient
from shared.messages import (
    PROTOCOL_VERSION,
    EventBatch,
    FinishEvent,
    FinishReason,
    JournalFrame,
    TokenEvent,
    Usage,
    WorkerHeartbeat,
    WorkerPhase,
    encode,
)
from shared.redis_client import RedisConnections
from shared.redis_keys import RedisKeys
from shared.subscription import Message
from tests.engine_worker.transport.rig import FlakyScripts, Held
from tests.gateway.store.conftest import HandPlayedWorker, make_request, rest, rest_until, start
from tests.patience import PATIENCE_SECONDS


class Wire:
    """Send messages to the gateway and wait until it has processed them."""

    def __init__(self, client: InferenceClient, connections: RedisConnections, keys: RedisKeys) -> None:
        self._client = client
        self._redis = connections.commands
        self._keys = keys
        self._num_sent = 0

    async def lose(self, request_id: str) -> None:
        await self._redis.unlink(self._keys.request(request_id), self._keys.journal(request_id))

    async def deliver_late(self, request_id: str, index: int, *token_ids: int) -> None:
        """Deliver a message of an earlier attempt after everything sent so far."""
        await self._redis.publish(self._keys.gateway_channel("g"), late(request_id, index, *token_ids))
        await self.drain()

    async def drain(self) -> None:
        self._num_sent += 1
        name = f"w.{self._num_sent}"
        beat = WorkerHeartbeat(worker_id=name, phase=WorkerPhase.LOAD)
        await self._redis.publish(self._keys.heartbeat_channel, encode(beat))
        while not any(status.heartbeat.worker_id == name for status in self._client.fleet.snapshot()):
            await asyncio.sleep(0)


def late(request_id: str, index: int, *token_ids: int) -> bytes:
    return encode(EventBatch(PROTOCOL_VERSION, "w0.before", 7, [TokenEvent(request_id, index, list(token_ids))]))


@pytest.fixture
def wire(client: InferenceClient, connections: RedisConnections, keys: RedisKeys) -> Wire:
    return Wire(client, connections, keys)


async def check_continues_as_the_journal(worker: HandPlayedWorker, stream: Inbox) -> None:
    """Continue after the first token; the message with the second one is lost."""
    while not await worker.claim():
        await asyncio.sleep(0)
    assert worker.journals["a"] == encode(JournalFrame(0, [5]))
    await worker.emit("a", 1, 66, is_delivered=False)
    await worker.emit("a", 2, 77)
    end = await worker.finish("a", 3)
    assert await rest(stream) == ([66, 77], end)


async def restoring(client: InferenceClient, flaky: FlakyScripts, wire: Wire, worker: Any) -> tuple[Inbox, Held]:
    """Lose a request after its first token and accept it again; the reply to the acceptance waits."""
    stream = await start(client, worker)
    await worker.emit("a", 0, 5)
    assert await rest_until(stream, 1) == [5]
    held = flaky.hold("accept")
    await wire.lose("a")
    client.streams.need_journals([stream])
    await held.is_applied.wait()
    return stream, held


async def test_late_token_during_the_acceptance_is_dropped(client, flaky, worker, wire):
    stream, held = await restoring(client, flaky, wire, worker)
    await wire.deliver_late("a", 1, 6)
    held.goes_on.set()
    await check_continues_as_the_journal(worker, stream)


async def test_late_token_in_the_socket_before_the_reply_is_dropped(client, flaky, worker, wire, connections, keys):
    stream, held = await restoring(client, flaky, wire, worker)
    handle_message, socket = client._listening.handle_message, []

    async def keep(message: Message) -> None:
        socket.append(message)

    client._listening.handle_message = keep
    await connections.commands.publish(keys.gateway_channel("g"), late("a", 1, 6))
    held.goes_on.set()
    while not client.counts.num_restored_requests or len(socket) < 2:  # the mark follows it
        await asyncio.sleep(0)
    client._listening.handle_message = handle_message
    for message in socket:
        await handle_message(message)
    await check_continues_as_the_journal(worker, stream)


@pytest.mark.parametrize("lost", ["the reply", "the mark"])
async def test_lost_acceptance_reply_or_mark_is_repeated(client, flaky, worker, wire, connections, lost):
    stream, held = await restoring(client, flaky, wire, worker)
    publish = connections.commands.publish

    async def lose(channel: str, data: bytes) -> None:
        connections.commands.publish = publish
        if lost == "the reply":
            raise ConnectionError("the reply was lost")

    connections.commands.publish = lose
    held.goes_on.set()
    async with asyncio.timeout(PATIENCE_SECONDS):
        while stream.state is StreamState.SUSPENDED:
            await asyncio.sleep(0)
    await check_continues_as_the_journal(worker, stream)


async def reading(client: Any, stream: Inbox) -> asyncio.Event:
    """Have the journal read; return what lets its decoding go on."""
    decoded, is_read, goes_on = client.archive.decoded, asyncio.Event(), asyncio.Event()

    async def slowly(*arguments: Any) -> Any:
        client.archive.decoded = decoded
        is_read.set()
        await goes_on.wait()
        return await decoded(*arguments)

    client.archive.decoded = slowly
    client.streams.need_journals([stream])
    await is_read.wait()
    return goes_on


async def test_end_read_before_a_failover_is_dropped(client, worker, wire, connections, keys):
    """The replica lacks the last token and the end; its worker generates another token."""
    stream = await start(client, worker)
    await worker.emit("a", 0, 5)
    assert await rest_until(stream, 1) == [5]
    key, journal, end = (
        keys.request("a"),
        keys.journal("a"),
        FinishEvent("a", FinishReason.STOP, Usage(prompt_tokens=2, completion_tokens=2)),
    )
    before = await connections.commands.get(journal)
    await connections.commands.append(journal, encode(JournalFrame(1, [6])))
    await connections.commands.hset(key, mapping={"state": "done", "terminal": encode(end)})
    goes_on = await reading(client, stream)
    await connections.commands.set(journal, before)
    await connections.commands.hset(key, "state", "running")
    client.streams.need_journals([stream])
    goes_on.set()
    await wire.drain()
    assert not stream.has_ended
    await worker.emit("a", 1, 66)
    end = await worker.finish("a", 2)
    assert await rest(stream) == ([66], end)


async def test_journal_read_before_the_reset_is_dropped(client, flaky, worker, wire):
    """The journal is long; its decoding ends only after the next attempt has begun."""
    stream = await start(client, worker)
    await worker.emit("a", 0, 5)
    assert await rest_until(stream, 1) == [5]
    await worker.emit("a", 1, 6, is_delivered=False)
    goes_on = await reading(client, stream)
    held = flaky.hold("accept")
    await wire.lose("a")
    client.streams.need_journals([stream])
    await held.is_applied.wait()
    goes_on.set()
    await wire.drain()
    held.goes_on.set()
    await check_continues_as_the_journal(worker, stream)


@pytest.mark.parametrize("begins_first", [True, False])
async def test_repeated_acceptance_of_a_begun_request_stores_nothing(client, flaky, worker, wire, begins_first):
    """Lose the first reply, then the request. It is restored with its token, not from the beginning.

    The token comes before the loss of the reply, or while the gateway waits to repeat the call.
    """
    flaky.fail("accept", "lose")
    held = flaky.hold("accept")
    submitting = asyncio.create_task(client.submission.submit(make_request()))
    await held.is_applied.wait()
    assert await worker.claim() == ["a"]
    if not begins_first:
        held.goes_on.set()
    await worker.emit("a", 0, 5)
    await wire.drain()
    await wire.lose("a")
    held.goes_on.set()
    stream = await submitting
    assert await rest_until(stream, 1) == [5]
    await check_continues_as_the_journal(worker, stream)
