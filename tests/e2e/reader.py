"""A client of one scripted request at the inference client: no token may be lost, doubled or out of order."""

import asyncio
import time
from typing import Any

from gateway.store.inference_client import InferenceClient
from shared.messages import FinishEvent, GenerationRequest, TokenEvent
from shared.new_requests import RetentionTerms
from tests.builders import expected_output, make_request
from tests.e2e.fleet import STOP_SECONDS
from tests.inbox_reader import InboxReader


class Reader:
    """Submits one request and reads its stream; checks that each index comes once, in order."""

    def __init__(
        self,
        client: InferenceClient,
        prompt: int | list[int] = 20,
        *,
        terms: RetentionTerms | None = None,
        **sampling: Any,
    ) -> None:
        self.request: GenerationRequest = make_request(prompt, ignore_eos=True, **sampling)
        self.tokens: list[int] = []
        self.longest_silence_seconds = 0.0  # between two events of the stream
        self.finished: asyncio.Task[FinishEvent] = asyncio.create_task(self._read(client, terms))

    async def _read(self, client: InferenceClient, terms: RetentionTerms | None) -> FinishEvent:
        stream = await client.submission.submit(self.request, terms=terms)
        heard_at = time.monotonic()
        async for event in InboxReader(stream):
            silence_seconds, heard_at = time.monotonic() - heard_at, time.monotonic()
            self.longest_silence_seconds = max(self.longest_silence_seconds, silence_seconds)
            if isinstance(event, TokenEvent):
                assert event.index == len(self.tokens)
                self.tokens += event.token_ids
            else:
                assert isinstance(event, FinishEvent), event
                return event
        raise AssertionError("the stream ended without a terminal event")

    async def has(self, num_tokens: int) -> None:
        async with asyncio.timeout(STOP_SECONDS):
            while len(self.tokens) < num_tokens:
                await asyncio.sleep(0.005)

    async def check_complete(self) -> None:
        end = await asyncio.wait_for(self.finished, STOP_SECONDS)
        assert self.tokens == expected_output(self.request, max_num_tokens=2048)
        assert end.usage.completion_tokens == len(self.tokens)
