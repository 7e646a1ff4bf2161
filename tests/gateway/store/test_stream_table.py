"""What the table of open streams counts is what they are."""

import asyncio
import random

from gateway.store.response_stream import ResponseStream, cancelled_event
from gateway.store.stream_table import StreamTable
from shared.messages import TokenEvent
from tests.gateway.store.conftest import make_request


def test_tokens_that_wait_are_counted_as_streams_come_begin_and_go() -> None:
    """In any order, two readers of a request among them, and each of them only once."""
    table, chance = StreamTable(asyncio.Event()), random.Random(7)
    for number in range(3_000):
        streams = list(table)
        match chance.choice(["add", "attach", "token", "discard", "end"]) if streams else "add":
            case "add":
                table.add(ResponseStream(make_request(f"request-{number}")))
            case "attach":
                table.add(ResponseStream(chance.choice(streams).request))
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
