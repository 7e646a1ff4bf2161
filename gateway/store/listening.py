"""The task that hears what the store publishes, gives tokens to their streams and heartbeats to the fleet.

Pub/sub is the fast path and may lose anything. This task never waits for the store: what may be missing is marked, and
recovery reads it from the journals.

A token's way back, where it comes from the store. It knows no reader's text and no HTTP.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from itertools import groupby
from operator import attrgetter

from gateway.admission import Fleet
from gateway.store.stream_table import DeliveryCounts, StreamTable
from shared.messages import FormatError, StreamEvent, decode_event_batch, decode_heartbeat
from shared.redis_client import RedisConnections
from shared.redis_keys import RedisKeys
from shared.subscription import GAP, Message, Subscription

logger = logging.getLogger(__name__)
_request_id = attrgetter("request_id")

TURN_SECONDS = 0.0015  # of the event loop, for messages; readers run in it within their slices (loop_scheduler.py)


class Listening:
    def __init__(
        self,
        connections: RedisConnections,
        keys: RedisKeys,
        gateway_id: str,
        streams: StreamTable,
        fleet: Fleet,
        counts: DeliveryCounts,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        channels = [keys.gateway_channel(gateway_id), keys.heartbeat_channel]
        self._subscription = Subscription(connections.subscriber, channels, clock=clock)
        self._gateway_id = gateway_id
        self._heartbeat_channel = keys.heartbeat_channel
        self._streams = streams
        self._fleet = fleet
        self._counts = counts
        self._clock = clock
        self._seconds_left = TURN_SECONDS  # of work, in this turn
        self._turn_ends_at = 0.0  # while it works

    async def run(self) -> None:
        """Owner task of the subscription."""
        while True:
            message = await self._subscription.get(timeout_seconds=1.0)
            self._turn_ends_at = time.perf_counter() + self._seconds_left
            if message is GAP:
                self._counts.num_gaps += 1
                self._streams.mark_behind(self._streams)
            elif isinstance(message, Message):
                await self.handle_message(message)
                await self._let_others()  # what has piled up does not wait for the socket, where they would have theirs
            self._seconds_left = self._turn_ends_at - time.perf_counter()

    async def aclose(self) -> None:
        await self._subscription.aclose()

    async def handle_message(self, message: Message) -> None:
        """Handle one message. An error ends the message, or the stream that it belongs to, and is counted."""
        try:
            if message.channel == self._heartbeat_channel:
                self._fleet.record_heartbeat(decode_heartbeat(message.data))
            else:
                batch = decode_event_batch(message.data)
                if batch.worker_id == self._gateway_id:
                    self._streams.begin_epoch(batch.step)
                await self._deliver(batch.events)
        except FormatError as error:
            self._counts.num_bad_messages += 1
            logger.warning("dropped a message on %s: %s", message.channel, error)
            self._mark_lost(message)
        except Exception:
            self._counts.num_message_errors += 1
            logger.exception("a message on %s failed", message.channel)
            self._mark_lost(message)

    def _mark_lost(self, message: Message) -> None:
        """Nobody knows whose tokens it held."""
        if message.channel != self._heartbeat_channel:
            self._streams.mark_behind(self._streams)

    async def _deliver(self, events: Iterable[StreamEvent]) -> None:
        """Request by request, so that all of one is done while the processor still has it at hand: with 1,000 streams
        a second pass over them costs 4 us a token more. So others' turn comes before a reader's slice is over."""
        now = self._clock()
        for request_id, of_one in groupby(events, _request_id):
            its_events = list(of_one)
            for stream in self._streams.of(request_id):
                if stream.is_set_aside:
                    continue
                stream.last_heard = now
                try:
                    for event in its_events:
                        stream.add_event(event)
                    self._streams.settle(stream)
                    stream.on_ready()
                except Exception:
                    self._counts.num_message_errors += 1
                    logger.exception("request %s failed", request_id)
                    self._streams.fail(stream)
            if time.perf_counter() >= self._turn_ends_at:
                await self._let_others()

    async def _let_others(self) -> None:
        """Their turn, if this task's is over."""
        if time.perf_counter() >= self._turn_ends_at:
            await asyncio.sleep(0)
            self._turn_ends_at = time.perf_counter() + TURN_SECONDS
