"""The task that receives published messages: it gives tokens to their streams and heartbeats to the fleet.

Pub/sub is the fast path and may lose messages. This task never waits for the store: streams that may miss something are
marked, and recovery reads their journals.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from itertools import groupby
from operator import attrgetter

from gateway.fleet import Fleet
from gateway.store.inbox import StreamState
from gateway.store.stream_table import DeliveryCounts, StreamTable
from shared.messages import FormatError, StreamEvent, TokenEvent, decode_event_batch, decode_heartbeat
from shared.redis_client import RedisConnections
from shared.redis_keys import RedisKeys
from shared.subscription import GAP, Message, Subscription

logger = logging.getLogger(__name__)
_request_id = attrgetter("request_id")

TURN_SECONDS = 0.0015  # time slice for messages; readers take their own slices within it (loop_scheduler.py)


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
        self._seconds_left = TURN_SECONDS  # in the current time slice
        self._turn_ends_at = 0.0  # only valid while a message is handled

    async def run(self) -> None:
        """Receive and handle messages. Runs as an owner task."""
        while True:
            message = await self._subscription.get(timeout_seconds=1.0)
            self._turn_ends_at = time.perf_counter() + self._seconds_left
            if message is GAP:
                self._counts.num_gaps += 1
                self._streams.need_journals(self._streams)
            elif isinstance(message, Message):
                await self.handle_message(message)
                await self._let_others()  # queued messages do not wait for the socket, so get() may not yield
            self._seconds_left = self._turn_ends_at - time.perf_counter()

    async def aclose(self) -> None:
        await self._subscription.aclose()

    async def handle_message(self, message: Message) -> None:
        """Handle one message. An error drops the message or ends the stream it belongs to, and is counted."""
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
            logger.warning("channel %s: message dropped: %s", message.channel, error)
            self._mark_lost(message)
        except Exception:
            self._counts.num_message_errors += 1
            logger.exception("channel %s: message failed", message.channel)
            self._mark_lost(message)

    def _mark_lost(self, message: Message) -> None:
        """Mark all streams, because a lost message may have had tokens of any of them."""
        if message.channel != self._heartbeat_channel:
            self._streams.need_journals(self._streams)

    async def _deliver(self, events: Iterable[StreamEvent]) -> None:
        """Deliver request by request, while its data is in the CPU caches.

        With 1,000 streams, a second pass over them would cost 4 us more per token. Of several readers of one answer,
        the first takes the events, and the others follow it in time slices of their keys.
        """
        now = self._clock()
        for request_id, of_one in groupby(events, _request_id):
            its_events = list(of_one)
            streams = self._streams.of(request_id)
            is_end = not isinstance(its_events[-1], TokenEvent)
            for stream in reversed(streams) if is_end else streams:  # the end of the first one is the last to be seen
                if stream.state is StreamState.SUSPENDED:
                    continue
                takes_events = True
                try:
                    if is_end:
                        stream.join_at_end(streams[0])
                    takes_events = is_end or stream is streams[0] or not (streams[0].is_current and stream.follows())
                    if takes_events:
                        stream.last_event_at = now
                        for event in its_events:
                            stream.add_event(event)
                        self._streams.settle(stream)
                    stream.on_ready()
                except Exception:
                    self._counts.num_message_errors += 1
                    logger.exception("request %s: failed", request_id)
                    self._streams.fail(stream)
                # A follower is only woken; its reading has time slices of its own.
                if takes_events and time.perf_counter() >= self._turn_ends_at:
                    await self._let_others()

    async def _let_others(self) -> None:
        """Yield to other tasks if this task's time slice has ended."""
        if time.perf_counter() >= self._turn_ends_at:
            await asyncio.sleep(0)
            self._turn_ends_at = time.perf_counter() + TURN_SECONDS
