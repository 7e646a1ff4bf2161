"""A hostile client: its requests, the connections it holds open, and the repetition of a pattern.

With several keys the same load comes from as many honest keys, each with a part of it.
"""

import asyncio
import itertools
import json
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import aiohttp

from bench.serving.own_fleet import MODEL
from bench.serving.raw_stream import RawStream, open_stream

ANSWER_SECONDS = 60.0  # time limit of a turn


@dataclass
class Hostile:
    session: aiohttp.ClientSession  # uses the first key
    url: str
    keys: list[str]
    answers: Counter[str] = field(default_factory=Counter)
    kept: dict[str, "asyncio.Task[str]"] = field(default_factory=dict)  # ids of kept answers, by key

    def key(self, number: int = 0) -> str:
        """Return the key of a turn or of a part of it."""
        return self.keys[number % len(self.keys)]

    async def post(self, path: str, body: bytes | dict[str, object] | aiohttp.FormData, *, number: int = 0) -> bytes:
        """Return the body of the answer; failures are counted. `number` is the index of the key."""
        data = json.dumps(body).encode() if isinstance(body, dict) else body
        headers = {"Authorization": f"Bearer {self.key(number)}"}
        if not isinstance(data, aiohttp.FormData):
            headers["Content-Type"] = "application/json"
        try:
            async with self.session.post(self.url + path, data=data, headers=headers) as answer:
                self.answers[str(answer.status)] += 1
                return await answer.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            self.answers[type(error).__name__] += 1
            return b""

    async def post_prompts(self, count: int, number: int, **fields: object) -> None:
        """Complete `count` prompts: one body of one key, or a body each of several keys."""
        bodies = [["x"] * count] if len(self.keys) == 1 else [["x"]] * count
        await asyncio.gather(*(
            self.post("/v1/completions", {"model": MODEL, "prompt": prompts, "ignore_eos": True, **fields},
                      number=number * count + place)
            for place, prompts in enumerate(bodies)
        ))  # fmt: skip

    async def hold(self, head: str, body: bytes = b"", *, number: int = 0) -> None:
        """Send a request and read no more than the first line of its answer, for ANSWER_SECONDS."""
        address = urlsplit(self.url)
        status = "unanswered"
        try:
            reader, writer = await asyncio.open_connection(address.hostname, address.port, limit=2**14)
        except OSError as error:
            self.answers[type(error).__name__] += 1
            return
        try:
            lines = [head, f"Host: {address.netloc}", f"Authorization: Bearer {self.key(number)}"]
            writer.write("\r\n".join([*lines, "", ""]).encode() + body)
            with suppress(OSError):
                status = (await reader.readline()).decode().split(" ")[1:2][0]
                await asyncio.sleep(ANSWER_SECONDS)
        except IndexError:
            status = "closed"
        finally:
            self.answers[status] += 1
            writer.transport.abort()

    async def open(self, body: dict[str, object]) -> asyncio.StreamWriter | None:
        """Open a stream and read only its response headers."""
        parts, stream = urlsplit(self.url), RawStream()
        assert parts.hostname is not None and parts.port is not None
        try:
            headers = {"Authorization": f"Bearer {self.key()}"}
            _, writer = await open_stream(
                parts.hostname, parts.port, {"model": MODEL, "stream": True, **body}, stream, headers=headers
            )
        except (OSError, asyncio.IncompleteReadError) as error:
            self.answers[type(error).__name__] += 1
            return None
        self.answers[str(stream.status)] += 1
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        return writer


@dataclass(frozen=True)
class Pattern:
    turn: Callable[[Hostile, int], Awaitable[object]]  # with the number of the turn
    at_once: int
    max_turns: int = 2**31
    worker_flags: tuple[str, ...] = ()
    max_concurrent: int | None = None  # of the hostile key
    divides: bool = False  # whether the baseline is the same load of honest keys
    max_livez_seconds: float = 0.05


async def attack(pattern: Pattern, url: str, keys: list[str], seconds: float, turns: int) -> Counter[str]:
    """Repeat a pattern for at most `turns` and `seconds`. Returns the number of answers by status."""
    turns = min(turns, pattern.max_turns)
    timeout = aiohttp.ClientTimeout(total=ANSWER_SECONDS)
    connector, headers = aiohttp.TCPConnector(limit=0), {"Authorization": f"Bearer {keys[0]}"}
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, headers=headers) as session:
        hostile, numbers, until = Hostile(session, url, keys), itertools.count(), time.monotonic() + seconds

        async def again_and_again() -> None:
            while (number := next(numbers)) < turns and time.monotonic() < until:
                await pattern.turn(hostile, number)

        with_all = asyncio.gather(*(again_and_again() for _ in range(pattern.at_once)))
        await asyncio.wait([asyncio.ensure_future(with_all)], timeout=seconds)
        with_all.cancel()
        await asyncio.gather(with_all, return_exceptions=True)
        return hostile.answers
