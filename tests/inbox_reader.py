"""The events of an inbox as an asynchronous iterator, for tests that read it in a task of their own."""

import asyncio
from collections.abc import AsyncIterator

from gateway.store.inbox import Inbox
from shared.messages import StreamEvent


class InboxReader(AsyncIterator[StreamEvent]):
    """Reads an inbox to its end. It holds nothing itself, so one can be made for each event."""

    def __init__(self, inbox: Inbox) -> None:
        self._inbox = inbox

    async def __anext__(self) -> StreamEvent:
        while (event := self._inbox.read()) is None:
            if self._inbox.has_ended:
                raise StopAsyncIteration
            ready = asyncio.Event()
            self._inbox.on_ready = ready.set
            await ready.wait()
        return event
