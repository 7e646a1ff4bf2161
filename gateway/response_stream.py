"""The events of one request, put in order: each token index once, then exactly one terminal event.

Pure bookkeeping between the client's tasks, which offer what they hear or read from the journal, and one reader. It
keeps every token it has: 4 bytes each, at most max_tokens of them, so a slow reader costs nothing more and a store that
lost its memory can be given the answer's beginning back. Knows no Redis and no text.
"""

import asyncio
from array import array
from collections.abc import AsyncIterator, Sequence

from shared.messages import (
    ErrorEvent,
    FinishEvent,
    FinishReason,
    GenerationRequest,
    StreamEvent,
    TerminalEvent,
    TokenEvent,
    Usage,
)


class ResponseStream(AsyncIterator[StreamEvent]):
    def __init__(self, request: GenerationRequest) -> None:
        self.request = request
        self.is_accepted = False
        self.is_behind = False  # a token or the end is known to be missing: the journal must be read
        self.last_heard = 0.0  # monotonic seconds; kept by the client
        self.num_repeated_tokens = 0
        self._tokens = array("i")
        self._num_read = 0
        self._terminal: TerminalEvent | None = None
        self._is_exhausted = False
        self._wakeup = asyncio.Event()

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def token_ids(self) -> list[int]:
        """All tokens so far."""
        return self._tokens.tolist()

    @property
    def next_index(self) -> int:
        return len(self._tokens)

    @property
    def has_ended(self) -> bool:
        return self._terminal is not None

    def offer(self, event: StreamEvent) -> None:
        """An event from pub/sub: in order, repeated, or after a hole."""
        if self.has_ended:
            return
        if isinstance(event, TokenEvent):
            self._take(event.index, event.token_ids)
        elif self._is_complete(event):
            self.end(event)
        else:
            self.is_behind = True

    def offer_journal(self, token_ids: Sequence[int], terminal: TerminalEvent | None) -> None:
        """The journal from its beginning, and the stored end; the end must have been read before the journal."""
        if self.has_ended:
            return
        self.is_behind = False
        self._take(0, token_ids)
        if terminal is not None:
            self.end(terminal)

    def end(self, terminal: TerminalEvent) -> None:
        self._terminal = terminal
        self._wakeup.set()

    async def __anext__(self) -> StreamEvent:
        """Tokens that came since the last read are joined in one TokenEvent."""
        while self._num_read == len(self._tokens) and self._terminal is None:
            self._wakeup.clear()
            await self._wakeup.wait()
        if self._num_read < len(self._tokens):
            index, self._num_read = self._num_read, len(self._tokens)
            return TokenEvent(self.request_id, index, self._tokens[index:].tolist())
        if self._is_exhausted or self._terminal is None:
            raise StopAsyncIteration
        self._is_exhausted = True
        return self._terminal

    def _take(self, index: int, token_ids: Sequence[int]) -> None:
        if index > self.next_index:
            self.is_behind = True
            return
        num_known = min(self.next_index - index, len(token_ids))
        self.num_repeated_tokens += num_known
        if num_known < len(token_ids):
            self._tokens.extend(token_ids[num_known:])
            self._wakeup.set()

    def _is_complete(self, terminal: TerminalEvent) -> bool:
        """An error does not tell how many tokens came before it, so the journal is asked."""
        if self.is_behind or isinstance(terminal, ErrorEvent):
            return False
        return terminal.usage.completion_tokens == self.next_index


def cancelled_event(stream: ResponseStream) -> FinishEvent:
    """The end as the reader sees it when this gateway withdraws the request."""
    usage = Usage(prompt_tokens=len(stream.request.prompt_token_ids), completion_tokens=stream.next_index)
    return FinishEvent(stream.request_id, FinishReason.CANCELLED, usage)
