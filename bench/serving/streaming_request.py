"""One streamed request to an OpenAI-compatible server, timed event by event.

The client shares its cores with the server, so an event costs only one typed decode and one clock reading.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import aiohttp
import msgspec

from bench.workload import PlannedRequest


@dataclass(slots=True, kw_only=True)
class RequestResult:
    """The result of a request; times are those of time.perf_counter."""

    requested_tokens: int
    sent_at: float
    event_times: list[float] = field(default_factory=list)  # of events with output
    prompt_tokens: int = 0
    completion_tokens: int = 0
    failure: str = ""  # empty if every requested token arrived

    @property
    def time_to_first_token_seconds(self) -> float:
        return self.event_times[0] - self.sent_at

    @property
    def duration_seconds(self) -> float:
        return self.event_times[-1] - self.sent_at

    @property
    def time_per_output_token_seconds(self) -> float | None:
        if self.completion_tokens < 2:
            return None
        return (self.event_times[-1] - self.event_times[0]) / (self.completion_tokens - 1)

    @property
    def inter_token_seconds(self) -> list[float]:
        return [later - earlier for earlier, later in pairwise(self.event_times)]


class _Delta(msgspec.Struct):
    role: str | None = None
    content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None

    @property
    def brings_output(self) -> bool:
        """Whether it has output; chat's opening chunk (a role) and a bare finish reason have none."""
        if self.text or (self.delta and self.delta.content):
            return True
        return self.finish_reason is None and not (self.delta and self.delta.role)


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Event).decode


@dataclass(frozen=True, kw_only=True)
class Target:
    session: aiohttp.ClientSession
    url: str  # base URL, without /v1
    model: str
    chat: bool
    exact_lengths: bool = True  # send ignore_eos, and treat any other number of tokens as a failure
    extra_body: dict[str, Any] = field(default_factory=dict)

    def body(self, request: PlannedRequest) -> dict[str, Any]:
        if self.chat:
            prompt: dict[str, Any] = {"messages": [{"role": "user", "content": request.prompt}]}
        else:
            prompt = {"prompt": request.prompt}
        eos = {"ignore_eos": True} if self.exact_lengths else {}
        return {
            "model": self.model,
            "max_tokens": request.output_tokens,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **eos,
            **prompt,
            **self.extra_body,
        }


async def send(target: Target, request: PlannedRequest) -> RequestResult:
    """Send a request; errors of the server or the network are part of the result."""
    path = "/v1/chat/completions" if target.chat else "/v1/completions"
    result = RequestResult(requested_tokens=request.output_tokens, sent_at=time.perf_counter())
    try:
        async with target.session.post(target.url + path, json=target.body(request)) as response:
            if response.status != 200:
                result.failure = f"HTTP {response.status}: {(await response.text())[:200]}"
                return result
            done = await _read_events(response.content, result)
    except (aiohttp.ClientError, TimeoutError, msgspec.DecodeError) as error:
        result.failure = f"{type(error).__name__}: {error}"[:200]
        return result
    result.failure = result.failure or _shortcoming(target, request, result, done)
    return result


async def _read_events(content: aiohttp.StreamReader, result: RequestResult) -> bool:
    """Read the stream and return whether it ended with [DONE]."""
    pending = b""
    done = False
    async for data in content.iter_any():
        now = time.perf_counter()
        *events, pending = (pending + data).split(b"\n\n")
        for payload in _payloads(events):
            done = payload == b"[DONE]"
            if not done:
                _take(_decode(payload), now, result)
    return done


def _payloads(events: list[bytes]) -> Iterator[bytes]:
    return (event[6:] for event in events if event.startswith(b"data: "))  # others are keep-alive comments


def _take(event: _Event, now: float, result: RequestResult) -> None:
    if event.error is not None:
        result.failure = f"error event: {event.error}"[:200]
    if event.choices and event.choices[0].brings_output:
        result.event_times.append(now)
    if event.usage is not None:
        result.prompt_tokens = event.usage.prompt_tokens
        result.completion_tokens = event.usage.completion_tokens


def _shortcoming(target: Target, request: PlannedRequest, result: RequestResult, done: bool) -> str:
    if not done:
        return "the stream ended without [DONE]"
    if not result.event_times or not result.completion_tokens:
        return "the stream had no token or no usage"
    if target.exact_lengths and result.completion_tokens != request.output_tokens:
        return f"{result.completion_tokens} tokens in usage, {request.output_tokens} were requested"
    if not target.chat and result.prompt_tokens != request.prompt_tokens:
        return f"{result.prompt_tokens} prompt tokens in usage, {request.prompt_tokens} were sent"
    return ""
