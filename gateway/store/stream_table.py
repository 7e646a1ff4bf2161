"""The open Inboxes of a gateway by request id: several if clients attached to the same request.

Submission opens streams, listening and recovery add events, and all three end them here. `wake` signals to recovery
that a stream misses something.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass

from gateway.store.inbox import Inbox, StreamState
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
        self._by_request_id: dict[str, tuple[Inbox, ...]] = {}
        self._num_repeated_tokens = 0  # of removed streams
        self._wake = wake
        self._num_epochs = 0
        self._waiting: set[Inbox] = set()  # no token has come yet
        self._suspended: dict[int, Inbox] = {}  # by epoch
        self.on_failed: Callable[[Inbox], None] = lambda stream: None  # withdraws it

    def __len__(self) -> int:
        return sum(map(len, self._by_request_id.values()))

    def __iter__(self) -> Iterator[Inbox]:
        """Iterate over a snapshot, because streams may be added or removed meanwhile."""
        return iter([stream for streams in self._by_request_id.values() for stream in streams])

    def __contains__(self, stream: Inbox) -> bool:
        return any(open_stream is stream for open_stream in self.of(stream.request_id))

    @property
    def num_repeated_tokens(self) -> int:
        """Number of tokens that came more than once, of all streams so far."""
        return self._num_repeated_tokens + sum(stream.num_repeated_tokens for stream in self)

    def of(self, request_id: str) -> tuple[Inbox, ...]:
        return self._by_request_id.get(request_id, ())

    def num_tokens_of(self, request_id: str) -> int | None:
        """Return the generated tokens of a request, or None if no reader here has them all."""
        return next((stream.num_tokens for stream in self.of(request_id) if stream.is_current), None)

    def add(self, stream: Inbox) -> None:
        self._by_request_id[stream.request_id] = (*self.of(stream.request_id), stream)
        stream.on_caught_up = self._caught_up
        if not stream.num_tokens:
            self._waiting.add(stream)
            self.num_waiting_tokens += len(stream.request.prompt_token_ids)

    def discard(self, *streams: Inbox) -> None:
        for stream in streams:
            if stream in self:
                self._num_repeated_tokens += stream.num_repeated_tokens
            self._begin(stream)
            left = tuple(other for other in self.of(stream.request_id) if other is not stream)
            if left:
                was_first = self.of(stream.request_id)[0] is stream
                self._by_request_id[stream.request_id] = left
                if was_first:
                    self._lead(left[0])
            else:
                self._by_request_id.pop(stream.request_id, None)
            self._suspended.pop(stream.epoch, None)

    def join(self, stream: Inbox) -> bool:
        """Let a stream take what the first reader of its answer has. Return False if it must read the journal."""
        leader = self._leader_of(stream)
        if leader is stream or not leader.is_current or not stream.join(leader):
            return False
        self.settle(stream)
        return True

    def _caught_up(self, stream: Inbox) -> None:
        """Let a paused stream continue; one that follows waits while its leader misses something."""
        leader = self._leader_of(stream)
        if leader is stream or (leader.is_current and not self.join(stream)):
            self._lead(stream)

    def _leader_of(self, stream: Inbox) -> Inbox:
        """Return the first reader of the answer, which the others follow."""
        return (self.of(stream.request_id) or (stream,))[0]

    def _lead(self, stream: Inbox) -> None:
        stream.lead()
        self._wake.set()

    def end(self, stream: Inbox, terminal: TerminalEvent) -> None:
        """End a stream for its reader only; the store is not changed."""
        stream.end(terminal)
        self.discard(stream)

    def fail(self, stream: Inbox) -> None:
        """End a stream with an error, here and in the store, because its handler raised."""
        with suppress(Exception):  # the reader's on_ready() may be what failed
            stream.end(ErrorEvent(stream.request_id, ErrorCode.REQUEST_FAILED, FAILED_MESSAGE))
        self.discard(stream)
        self.on_failed(stream)

    def settle(self, stream: Inbox) -> None:
        """Update the table after events were added: the stream may have begun or ended, or miss earlier events."""
        if self._waiting and stream in self._waiting and stream.num_tokens:
            self._begin(stream)
        if stream.state is StreamState.LIVE:  # nearly always
            return
        if stream.has_ended:
            self.discard(stream)
        elif stream.state is StreamState.NEEDS_JOURNAL or stream.state is StreamState.DIVERGED:
            self._wake.set()

    def _begin(self, stream: Inbox) -> None:
        """Remove its prompt from the waiting tokens."""
        if stream in self._waiting:
            self._waiting.remove(stream)
            self.num_waiting_tokens -= len(stream.request.prompt_token_ids)

    def suspend(self, stream: Inbox) -> None:
        """Start a new epoch: a new journal that begins with the current tokens.

        Published events still in flight may be of the old journal. Until the marker of the new epoch arrives, tokens
        are taken only from the new journal.
        """
        self._suspended.pop(stream.epoch, None)
        self._num_epochs += 1
        self._suspended[self._num_epochs] = stream
        stream.suspend(self._num_epochs)

    def begin_epoch(self, epoch: int) -> None:
        """Handle the marker of an epoch: everything published earlier has arrived, so new events are of this epoch."""
        if stream := self._suspended.pop(epoch, None):
            stream.resume()
            self._wake.set()

    def need_journals(self, streams: Iterable[Inbox]) -> None:
        """Have recovery read the journals of these streams."""
        for stream in streams:
            stream.need_journal()
        self._wake.set()
