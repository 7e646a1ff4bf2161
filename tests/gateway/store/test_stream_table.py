"""The counters of the stream table equal the state of its streams."""

import asyncio
import random

from gateway.store.inbox import Inbox, cancelled_event
from gateway.store.stream_table import StreamTable
from shared.messages import TokenEvent
from tests.gateway.store.conftest import make_request


def test_waiting_token_count_follows_every_stream_change() -> None:
    """Add, read and remove streams in any order, with two readers of one request; each counts once."""
    table, chance = StreamTable(asyncio.Event()), random.Random(7)
    for number in range(3_000):
        streams = list(table)
        match chance.choice(["add", "attach", "token", "discard", "end"]) if streams else "add":
            case "add":
                table.add(Inbox(make_request(f"request-{number}")))
            case "attach":
                table.add(Inbox(chance.choice(streams).request))
            case "token":
                stream = chance.choice(streams)
                stream.add_event(TokenEvent(stream.request_id, stream.num_tokens, [5]))
                table.settle(stream)
            case "discard":
                gone = chance.choice(streams)
                table.discard(gone)
                table.discard(gone)
            case "end":
                stream = chance.choice(streams)
                table.end(stream, cancelled_event(stream))
        waiting = [stream for stream in table if not stream.num_tokens]
        assert table.num_waiting_tokens == sum(len(stream.request.prompt_token_ids) for stream in waiting)
    assert table.num_waiting_tokens > 0
