"""The open ResponseStreams of a gateway by request id: several if clients attached to the same request.

Submission opens streams, listening and recovery add events, and all three end them here. `wake` signals to recovery
that a stream misses something.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass

from gateway.store.response_stream import ResponseStream
from shared.messages import ErrorCode, ErrorEvent, TerminalEvent

FAILED_MESSAGE = "the gateway could not process the answer"


@dataclass
class DeliveryCounts:
    """One gateway's counters for a model, for metrics only (gateway/metrics.py)."""

    num_journal_reads: int = 0
    num_bad_messages: int = 0
    num_restored_requests: int = 0
    num_gaps: int = 0
    num_torn_streams: int = 0
    num_message_errors: int = 0


class StreamTable:
    def __init__(self, wake: asyncio.Event) -> None:
        self.num_waiting_tokens = 0  # of prompts without a token yet; a running sum, because each request reads it
        self._by_request_id: dict[str, tuple[ResponseStream, ...]] = {}
        self._num_repeated_tokens = 0  # of removed streams
        self._wake = wake
        self._num_epochs = 0
        self._set_aside: dict[int, ResponseStream] = {}  # by epoch
        self.on_failed: Callable[[ResponseStream], None] = lambda stream: None  # withdraws it

    def __len__(self) -> int:
        return sum(map(len, self._by_request_id.values()))

    def __iter__(self) -> Iterator[ResponseStream]:
        """Iterate over a snapshot, because streams may be added or removed meanwhile."""
        return iter([stream for streams in self._by_request_id.values() for stream in streams])

    def __contains__(self, stream: ResponseStream) -> bool:
        return any(open_stream is stream for open_stream in self.of(stream.request_id))

    @property
    def num_repeated_tokens(self) -> int:
        """Number of tokens that came more than once, of all streams so far."""
        return self._num_repeated_tokens + sum(stream.num_repeated_tokens for stream in self)

    def of(self, request_id: str) -> tuple[ResponseStream, ...]:
        return self._by_request_id.get(request_id, ())

    def add(self, stream: ResponseStream) -> None:
        self._by_request_id[stream.request_id] = (*self.of(stream.request_id), stream)
        stream.on_caught_up = self._wake.set
        stream.waits = not stream.num_tokens
        if stream.waits:
            self.num_waiting_tokens += len(stream.request.prompt_token_ids)

    def discard(self, *streams: ResponseStream) -> None:
        for stream in streams:
            if stream in self:
                self._num_repeated_tokens += stream.num_repeated_tokens
            self._begin(stream)
            left = tuple(other for other in self.of(stream.request_id) if other is not stream)
            if left:
                self._by_request_id[stream.request_id] = left
            else:
                self._by_request_id.pop(stream.request_id, None)
            self._set_aside.pop(stream.epoch, None)

    def end(self, stream: ResponseStream, terminal: TerminalEvent) -> None:
        """End a stream for its reader only; the store is not changed."""
        stream.end(terminal)
        self.discard(stream)

    def fail(self, stream: ResponseStream) -> None:
        """End a stream with an error, here and in the store, because its handler raised."""
        with suppress(Exception):  # the reader's on_ready() may be what failed
            stream.end(ErrorEvent(stream.request_id, ErrorCode.REQUEST_FAILED, FAILED_MESSAGE))
        self.discard(stream)
        self.on_failed(stream)

    def settle(self, stream: ResponseStream) -> None:
        """Update the table after events were added: the stream may have begun or ended, or miss earlier events."""
        if stream.waits and stream.num_tokens:
            self._begin(stream)
        if stream.has_ended:
            self.discard(stream)
        elif stream.is_behind:
            self._wake.set()

    def _begin(self, stream: ResponseStream) -> None:
        """Remove its prompt from the waiting tokens."""
        if stream.waits:
            stream.waits = False
            self.num_waiting_tokens -= len(stream.request.prompt_token_ids)

    def set_aside(self, stream: ResponseStream) -> None:
        """Start a new epoch: a new journal that begins with the current tokens.

        Published events still in flight may be of the old journal. Until the mark of the new epoch arrives, the stream
        takes tokens only from the new journal.
        """
        self._set_aside.pop(stream.epoch, None)
        self._num_epochs += 1
        self._set_aside[self._num_epochs] = stream
        stream.epoch, stream.is_set_aside = self._num_epochs, True
        stream.has_diverged, stream.is_behind = False, True

    def begin_epoch(self, epoch: int) -> None:
        """Handle the mark of an epoch: everything published earlier has arrived, so new events are of this epoch."""
        if stream := self._set_aside.pop(epoch, None):
            stream.is_set_aside = False
            self.mark_behind([stream])

    def mark_behind(self, streams: Iterable[ResponseStream]) -> None:
        """Have recovery read the journals of these streams."""
        for stream in streams:
            stream.is_behind = True
        self._wake.set()
