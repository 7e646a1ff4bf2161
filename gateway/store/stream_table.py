"""The open ResponseStreams of a gateway by request id: one, or several where clients attached to the same request.

Submission opens them, listening and recovery give them what comes, and all three end them here. `wake` tells recovery
that one of them misses something. So it stands where a chat's way in ends and a token's way back begins. It knows no
Redis and no HTTP.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass

from gateway.store.response_stream import ResponseStream
from shared.messages import ErrorCode, ErrorEvent, TerminalEvent

FAILED_MESSAGE = "the gateway failed to read the answer"


@dataclass
class DeliveryCounts:
    """One gateway's counts of a model's deliveries; read at a scrape (gateway/metrics.py), never acted on."""

    num_journal_reads: int = 0
    num_bad_messages: int = 0
    num_restored_requests: int = 0
    num_gaps: int = 0
    num_torn_streams: int = 0
    num_message_errors: int = 0


class StreamTable:
    def __init__(self, wake: asyncio.Event) -> None:
        self.num_waiting_tokens = 0  # of prompts of which nothing has come: counted, as each request asks
        self._by_request_id: dict[str, tuple[ResponseStream, ...]] = {}
        self._num_repeated_tokens = 0  # of streams that are here no more
        self._wake = wake
        self._num_epochs = 0
        self._set_aside: dict[int, ResponseStream] = {}  # by epoch
        self.on_failed: Callable[[ResponseStream], None] = lambda stream: None  # to be withdrawn from the store

    def __len__(self) -> int:
        return sum(map(len, self._by_request_id.values()))

    def __iter__(self) -> Iterator[ResponseStream]:
        """As they are now: streams may come and go while the caller iterates."""
        return iter([stream for streams in self._by_request_id.values() for stream in streams])

    def __contains__(self, stream: ResponseStream) -> bool:
        return any(open_stream is stream for open_stream in self.of(stream.request_id))

    @property
    def num_repeated_tokens(self) -> int:
        """Tokens that came more than once, of all streams there have been."""
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
        """For its reader; the store is not told."""
        stream.end(terminal)
        self.discard(stream)

    def fail(self, stream: ResponseStream) -> None:
        """Its handler raised: the stream ends with an error, here and in the store, and the others go on."""
        with suppress(Exception):  # what failed may be its reader's on_ready()
            stream.end(ErrorEvent(stream.request_id, ErrorCode.REQUEST_FAILED, FAILED_MESSAGE))
        self.discard(stream)
        self.on_failed(stream)

    def settle(self, stream: ResponseStream) -> None:
        """After it was given something: it may have begun or ended, or miss what came before."""
        if stream.waits and stream.num_tokens:
            self._begin(stream)
        if stream.has_ended:
            self.discard(stream)
        elif stream.is_behind:
            self._wake.set()

    def _begin(self, stream: ResponseStream) -> None:
        """Its prompt waits no more."""
        if stream.waits:
            stream.waits = False
            self.num_waiting_tokens -= len(stream.request.prompt_token_ids)

    def set_aside(self, stream: ResponseStream) -> None:
        """Its journal begins anew, behind the tokens that it has now. What is on its way to this gateway may be of the
        one before: until the mark of its new epoch is heard, nothing is given to it but what the new journal tells."""
        self._set_aside.pop(stream.epoch, None)
        self._num_epochs += 1
        self._set_aside[self._num_epochs] = stream
        stream.epoch, stream.is_set_aside = self._num_epochs, True
        stream.is_torn, stream.is_behind = False, True

    def begin_epoch(self, epoch: int) -> None:
        """Its mark was heard: what was published before it has come, and what comes now is of the new journal."""
        if stream := self._set_aside.pop(epoch, None):
            stream.is_set_aside = False
            self.mark_behind([stream])

    def mark_behind(self, streams: Iterable[ResponseStream]) -> None:
        """Nobody knows what they miss: their journals do."""
        for stream in streams:
            stream.is_behind = True
        self._wake.set()
