"""A client of streamed completions that repeats refused requests and resumes broken streams.

Each request has an Idempotency-Key, so that a request whose acceptance got lost is not computed twice. A broken stream
is resumed at any gateway with Last-Event-ID. The result must be the answer of an undisturbed server, once.
"""

import asyncio
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

RETRY_SECONDS = 0.2
DETACH_SECONDS = 120


class ClientFailed(AssertionError):
    """The server broke a promise: an accepted request failed, or an event was wrong."""


@dataclass
class Answer:
    texts: list[str]
    finish_reasons: list[str | None]
    num_ends: int = 0  # number of [DONE] events
    num_refusals: int = 0
    num_resumes: int = 0
    longest_silence_seconds: float = 0.0
    last_event_id: str = ""
    request_id: str = ""
    heard_at: float = field(default_factory=time.monotonic)

    def take(self, chunk: dict[str, Any]) -> None:
        if "error" in chunk:
            raise ClientFailed(f"{self.request_id}: {chunk['error']}")
        now = time.monotonic()
        self.longest_silence_seconds = max(self.longest_silence_seconds, now - self.heard_at)
        self.heard_at = now
        for choice in chunk["choices"]:
            if self.finish_reasons[choice["index"]] is not None:
                raise ClientFailed(f"{self.request_id}: {choice} after the end of its choice")
            self.texts[choice["index"]] += choice["text"]
            self.finish_reasons[choice["index"]] = choice["finish_reason"]


def empty_answer(body: dict[str, Any]) -> Answer:
    num_choices = body.get("n", 1)
    return Answer([""] * num_choices, [None] * num_choices)


class StreamClient:
    def __init__(self, session: aiohttp.ClientSession, urls: Sequence[str], source: random.Random) -> None:
        """Create a client; `urls` are all gateways, of which some may be down."""
        self._session = session
        self._urls = urls
        self._random = source

    async def complete(self, body: dict[str, Any], answer: Answer | None = None) -> Answer:
        """Fill the empty `answer` while the stream comes."""
        answer = answer or empty_answer(body)
        headers = {"Idempotency-Key": f"{self._random.getrandbits(128):032x}"}
        while not answer.num_ends:
            try:
                if answer.last_event_id:
                    answer.num_resumes += 1
                    path = f"/v1/requests/{answer.request_id}/events"
                    call = self._session.get(self._url(path), headers={"Last-Event-ID": answer.last_event_id})
                else:
                    sent = {**body, "stream": True, "detach_seconds": DETACH_SECONDS}
                    call = self._session.post(self._url("/v1/completions"), json=sent, headers=headers)
                await self._read(call, answer)
            except (aiohttp.ClientError, ConnectionError):
                await asyncio.sleep(RETRY_SECONDS)
        return answer

    def _url(self, path: str) -> str:
        return self._random.choice(self._urls) + path

    async def _read(self, call: Any, answer: Answer) -> None:
        async with call as reply:
            if reply.status in (429, 503):
                answer.num_refusals += 1
                await asyncio.sleep(RETRY_SECONDS)
                return
            if reply.status != 200:
                raise ClientFailed(f"{answer.request_id}: {reply.status} {await reply.text()}")
            answer.request_id = answer.request_id or reply.headers["Content-Location"].rpartition("/")[2]
            event_id = ""
            async for line in reply.content:
                if line.startswith(b"id: "):
                    event_id = line[4:].strip().decode()
                elif line == b"data: [DONE]\n":
                    answer.num_ends += 1
                elif line.startswith(b"data: "):
                    answer.take(json.loads(line[6:]))
                    answer.last_event_id = event_id
