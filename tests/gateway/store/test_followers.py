"""Several readers of one answer: the first takes the events, and the others follow it."""

import asyncio
import random
from collections.abc import Callable
from functools import partial

import pytest

from gateway.store.inbox import Inbox, StreamState, cancelled_event
from gateway.store.inference_client import InferenceClient
from gateway.store.stream_table import StreamTable
from shared.messages import FinishEvent, FinishReason, StoredChoice, StreamEvent, TokenEvent, Usage
from tests.gateway.store.conftest import HandPlayedWorker, make_request, rest, rest_until, start
from tests.patience import PATIENCE_SECONDS


def attached(client: InferenceClient, count: int) -> list[Inbox]:
    """Return further readers of request a."""
    readers = [Inbox(make_request()) for _ in range(count)]
    for reader in readers:
        reader.accept()
        client.streams.add(reader)
    return readers


async def test_all_readers_get_all_tokens_and_the_end(client: InferenceClient, worker: HandPlayedWorker) -> None:
    readers = [await start(client, worker), *attached(client, 2)]
    for index in range(5):
        await worker.emit("a", index, 10 + index)
    assert await rest_until(readers[1], 5) == [10, 11, 12, 13, 14]
    assert [reader.state for reader in readers] == [StreamState.LIVE, StreamState.PAUSED, StreamState.PAUSED]
    await worker.emit("a", 5, 15)
    end = await worker.finish("a", 6)
    assert await rest(readers[0]) == ([10, 11, 12, 13, 14, 15], end)
    assert await rest(readers[1]) == ([15], end)
    assert await rest(readers[2]) == ([10, 11, 12, 13, 14, 15], end)
    assert client.counts.num_journal_reads == 0
    assert not len(client.streams) and not client.streams.num_waiting_tokens


async def test_next_reader_takes_over_when_the_first_leaves(client: InferenceClient, worker: HandPlayedWorker) -> None:
    first, *others = await start(client, worker), *attached(client, 2)
    for index in range(3):
        await worker.emit("a", index, 10 + index)
    assert await rest_until(first, 3) == [10, 11, 12]
    client.streams.end(first, cancelled_event(first))
    await worker.emit("a", 3, 13)
    end = await worker.finish("a", 4)
    for other in others:
        assert await rest(other) == ([10, 11, 12, 13], end)


async def test_waiting_reader_takes_over_when_the_first_leaves(
    client: InferenceClient, worker: HandPlayedWorker
) -> None:
    """No message tells it that there is more to read."""
    first, other = await start(client, worker), *attached(client, 1)
    waiting = asyncio.create_task(rest(other))
    for index in range(3):
        await worker.emit("a", index, 10 + index)
    assert await rest_until(first, 3) == [10, 11, 12]
    async with asyncio.timeout(PATIENCE_SECONDS):
        while other.num_tokens < 3:
            await asyncio.sleep(0)
    client.streams.end(first, cancelled_event(first))
    await worker.emit("a", 3, 13, is_delivered=False)
    end = await worker.finish("a", 4, is_delivered=False)
    assert await waiting == ([10, 11, 12, 13], end)


async def test_follower_that_fails_ends_alone(client: InferenceClient, worker: HandPlayedWorker) -> None:
    def fail() -> None:
        if bad.state is StreamState.PAUSED:
            raise RuntimeError("planned")

    good, bad = await start(client, worker), *attached(client, 1)
    bad.on_ready = fail
    for index in range(2):
        await worker.emit("a", index, 10 + index)
    assert await rest_until(good, 2) == [10, 11]
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not bad.has_ended:
            await asyncio.sleep(0)
    assert client.counts.num_message_errors == 1 and good.num_doubts == 0


@pytest.mark.parametrize("lost", [{1}, {3}, {0, 4}], ids=str)
async def test_lost_messages_reach_all_readers(
    client: InferenceClient, worker: HandPlayedWorker, lost: set[int]
) -> None:
    readers = [await start(client, worker), *attached(client, 3)]
    for index in range(5):
        await worker.emit("a", index, 10 + index, is_delivered=index not in lost)
    end = await worker.finish("a", 5, is_delivered=False)
    for reader in readers:
        assert await rest(reader) == ([10, 11, 12, 13, 14], end)


class Answer:
    """An answer. Readers come and go, messages are lost, and journals are read at any time."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.table = StreamTable(asyncio.Event())
        self.tokens: list[int] = []
        self.end: FinishEvent | None = None
        self.read: dict[Inbox, list[int]] = {}
        self.ends: dict[Inbox, StreamEvent] = {}

    def attach(self) -> None:
        reader = Inbox(make_request())
        reader.accept()
        self.table.add(reader)
        self.read[reader] = []
        if not self.table.join(reader):
            reader.need_journal()

    def generate(self) -> None:
        event = TokenEvent("a", len(self.tokens), [self.chance.randrange(1_000)])
        self.tokens += event.token_ids
        self.publish(event)

    def finish(self) -> None:
        usage = Usage(prompt_tokens=2, completion_tokens=len(self.tokens))
        self.end = FinishEvent("a", FinishReason.LENGTH, usage)
        self.publish(self.end)

    def publish(self, event: StreamEvent) -> None:
        """Deliver as Listening does, or lose it."""
        if self.chance.random() < 0.2:
            return
        first, *_ = streams = self.table.of("a") or (Inbox(make_request()),)
        is_end = not isinstance(event, TokenEvent)
        for stream in reversed(streams) if is_end else streams:
            if is_end:
                stream.join_at_end(first)
            if stream is first or is_end or not first.is_current or not stream.follows():
                stream.add_event(event)
                self.table.settle(stream)

    def read_some(self, reader: Inbox) -> None:
        event = reader.read()
        if isinstance(event, TokenEvent):
            assert event.index == len(self.read[reader])
            self.read[reader] += event.token_ids
        elif event is not None:
            self.ends[reader] = event

    def leave(self, reader: Inbox) -> None:
        self.table.end(reader, cancelled_event(reader))
        del self.read[reader]

    def recover(self, reader: Inbox) -> None:
        """As recovery does with a stream that needs its journal, or that had no events for a while."""
        if reader in self.table and reader.state is not StreamState.PAUSED and not self.table.join(reader):
            reader.begin_replay()
            reader.add_journal([StoredChoice(list(self.tokens))], self.end)
            reader.end_replay()
            self.table.settle(reader)

    def step(self) -> None:
        steps: list[Callable[[], None]] = [self.generate, self.generate, self.attach] if self.end is None else []
        for reader in [*self.read]:
            steps += [partial(self.read_some, reader)] * 3
            if reader in self.table:
                steps.append(partial(self.recover, reader))
                if self.chance.random() < 0.1:
                    steps.append(partial(self.leave, reader))
                if self.chance.random() < 0.05:
                    steps.append(reader.need_journal)
        self.chance.choice(steps or [self.attach])()


@pytest.mark.parametrize("seed", range(200))
def test_random_readers_get_exactly_the_answer(seed: int) -> None:
    answer = Answer(seed)
    for _ in range(120):
        answer.step()
    answer.finish()
    for _ in range(20):
        answer.step()
    for _ in range(len(answer.read) + 1):  # each ends, and lets the next one take events
        for reader in [*answer.read]:
            answer.recover(reader)
            for _ in range(len(answer.tokens) + 1):
                answer.read_some(reader)
    assert answer.read and not len(answer.table)
    for reader, token_ids in answer.read.items():
        assert token_ids == answer.tokens and answer.ends[reader] == answer.end
