"""The inference client on a real server, scripts that fail or wait on demand, and a manually driven worker."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from gateway.store.acceptance import QueueRules
from gateway.store.inbox import Inbox
from gateway.store.inference_client import InferenceClient
from shared.messages import (
    FinishEvent,
    FinishReason,
    GenerationRequest,
    JournalFrame,
    SamplingParams,
    TokenEvent,
    Usage,
    encode,
)
from shared.redis_client import RedisConnections
from shared.redis_keys import RedisKeys
from shared.redis_scripts import Demand, Ending, GatewayMessage, RedisScripts, StepFrame, gateway_message
from tests.engine_worker.transport.rig import FlakyScripts
from tests.inbox_reader import InboxReader
from tests.patience import PATIENCE_SECONDS

WORKER = "w0.aaaa"


def make_request(request_id: str = "a", **options: Any) -> GenerationRequest:
    sampling = SamplingParams(max_tokens=99, seed=0)
    return GenerationRequest(request_id=request_id, prompt_token_ids=[1, 2], sampling=sampling, **options)


class HandPlayedWorker:
    """A worker that the test drives.

    With `is_delivered=False` it writes the journal and sends no message, as if it was lost.
    """

    def __init__(self, scripts: RedisScripts) -> None:
        self.scripts = scripts
        self.step = 0
        self.claimed: dict[str, Any] = {}
        self.journals: dict[str, bytes] = {}

    async def claim(self) -> list[str]:
        await self.scripts.register(WORKER)
        entries = (await self.scripts.take(WORKER, Demand(100))).entries
        replies = await self.scripts.claim(WORKER, entries)
        for entry, reply in zip(entries, replies, strict=True):
            self.claimed[entry.request_id] = entry
            self.journals[entry.request_id] = reply.journal if reply else b""
        return [entry.request_id for entry in entries]

    async def emit(self, request_id: str, index: int, *token_ids: int, is_delivered: bool = True) -> list[str]:
        self.step += 1
        event = TokenEvent(request_id, index, list(token_ids))
        frame = encode(JournalFrame(index, list(token_ids)))
        frames = [StepFrame(request_id, self.claimed[request_id].entry_id, frame)]
        return await self.scripts.emit(WORKER, self.step, frames, self._messages(event, is_delivered))

    async def finish(self, request_id: str, completion_tokens: int, *, is_delivered: bool = True) -> FinishEvent:
        usage = Usage(prompt_tokens=2, completion_tokens=completion_tokens)
        event = FinishEvent(request_id, FinishReason.STOP, usage)
        entry = self.claimed[request_id]
        ending = Ending(request_id, entry.queue, entry.entry_id, encode(event))
        await self.scripts.finish(WORKER, [ending], self._messages(event, is_delivered))
        return event

    def _messages(self, event: Any, is_delivered: bool) -> list[GatewayMessage]:
        return [gateway_message("g", WORKER, self.step, [event], {event.request_id: 0})] if is_delivered else []


@pytest.fixture
def worker(scripts: RedisScripts) -> HandPlayedWorker:
    return HandPlayedWorker(scripts)


@pytest.fixture
def flaky(connections: RedisConnections, keys: RedisKeys) -> FlakyScripts:
    """Return the client's own scripts, with faults on demand."""
    return FlakyScripts(connections.commands, keys)


@pytest.fixture
async def client(connections: RedisConnections, keys: RedisKeys, flaky: FlakyScripts) -> AsyncIterator[InferenceClient]:
    client = InferenceClient(connections, keys, "g", queue_rules=QueueRules(3), quiet_seconds=0.2, scripts=flaky)
    await client.start()
    await subscribed(connections, keys)
    yield client
    await client.close()


async def subscribed(connections: RedisConnections, keys: RedisKeys) -> None:
    channel = keys.gateway_channel("g")
    while not (await connections.commands.pubsub_numsub(channel))[0][1]:
        await asyncio.sleep(0)


async def num_waiting(scripts: RedisScripts) -> int:
    """Return the number of entries that a worker would get now."""
    return len((await scripts.take(WORKER, Demand(99))).entries)


async def rest(stream: Inbox) -> tuple[list[int], Any]:
    """Return all further tokens and the end."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        events = [event async for event in InboxReader(stream)]
    *tokens, end = events
    tokens_of_each = [event.token_ids for event in tokens if isinstance(event, TokenEvent)]
    assert len(tokens_of_each) == len(tokens)
    return [token_id for token_ids in tokens_of_each for token_id in token_ids], end


async def start(client: InferenceClient, worker: HandPlayedWorker, request_id: str = "a") -> Inbox:
    stream = await client.submission.submit(make_request(request_id))
    assert await worker.claim() == [request_id]
    return stream


async def rest_until(stream: Inbox, num_tokens: int) -> list[int]:
    token_ids: list[int] = []
    async with asyncio.timeout(PATIENCE_SECONDS):
        while len(token_ids) < num_tokens:
            event = await anext(InboxReader(stream))
            assert isinstance(event, TokenEvent)
            token_ids += event.token_ids
    return token_ids
