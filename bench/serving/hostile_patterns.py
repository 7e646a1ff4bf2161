"""python -m bench.serving.hostile_patterns NAME --url URL --key KEY: one client that does its worst, within its key.

Twelve patterns; each repeats its turn at several places at once until --seconds are over or --turns are done. Prints
how many answers had which status.

A process of its own that has only what the others leave of the processors: a stranger's clients run elsewhere, and what
it costs to be hostile must not be measured as a cost of being its neighbour.
"""

import argparse
import asyncio
import itertools
import json
import os
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import lru_cache
from urllib.parse import urlsplit

import aiohttp

from bench.serving.own_fleet import MODEL
from bench.serving.raw_stream import RawStream, open_stream

BODY_BYTES = 2 * 2**20  # the most that a gateway takes
ANSWER_SECONDS = 60.0  # that a turn waits
CHATS, TEXTS = "/v1/chat/completions", "/v1/completions"


@dataclass
class Hostile:
    session: aiohttp.ClientSession  # has the key
    url: str
    key: str
    answers: Counter[str] = field(default_factory=Counter)

    async def post(self, path: str, body: bytes | dict[str, object] | aiohttp.FormData) -> bytes:
        """Returns the answer's body; what fails is counted."""
        data = json.dumps(body).encode() if isinstance(body, dict) else body
        headers = {} if isinstance(data, aiohttp.FormData) else {"Content-Type": "application/json"}
        try:
            async with self.session.post(self.url + path, data=data, headers=headers) as answer:
                self.answers[str(answer.status)] += 1
                return await answer.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            self.answers[type(error).__name__] += 1
            return b""

    async def open(self, body: dict[str, object]) -> asyncio.StreamWriter | None:
        """A stream of which nothing is read but its head."""
        parts, stream = urlsplit(self.url), RawStream()
        assert parts.hostname is not None and parts.port is not None
        try:
            headers = {"Authorization": f"Bearer {self.key}"}
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
    turn: Callable[[Hostile, int], Awaitable[object]]  # the number of the turn tells one from the next
    at_once: int


def _filled(start: bytes, unit: bytes, end: bytes = b"") -> bytes:
    return start + unit * ((BODY_BYTES - len(start) - len(end)) // len(unit)) + end


@lru_cache
def _json_bodies() -> list[bytes]:
    chat = b'{"messages":[{"role":"user","content":"x"}],'
    values = chat + b'"tools":[{"type":"function","function":{"name":"f","parameters":{"x":['
    return [
        _filled(b'{"messages":' + b"[" * 33 + b'"', b'\\"'),
        _filled(b'{"messages":', b"["),
        _filled(chat + b'"x":[', b"[" * 30 + b"]" * 30 + b",", b"1]}"),
        _filled(values, b"1e308,", b"1]}}}]}"),
        _filled(values, b'"[",1,', b"1]}}}]}"),
        _filled(chat + b'"x":[', b"{},", b"{}]}"),
    ]


async def _deep_json(hostile: Hostile, number: int) -> None:
    bodies = _json_bodies()
    await hostile.post(CHATS, bodies[number % len(bodies)])


async def _grammar_bomb(hostile: Hostile, number: int) -> None:
    rules = [f"a_{level}: a_{level + 1} a_{level + 1}" for level in range(30)]
    grammar = "\n".join(["start: a_0", *rules, f'a_30: "{number}"'])
    await hostile.post(TEXTS, _text(max_tokens=1, structured_outputs={"grammar": grammar}))


async def _huge_schema(hostile: Hostile, number: int) -> None:
    properties = {f"p{number}_{place}": {"type": "array", "items": {"enum": [place, "a", "b"]}} for place in range(800)}
    schema = {"type": "object", "properties": properties, "required": [*properties]}
    await hostile.post(TEXTS, _text(max_tokens=1, structured_outputs={"json": schema}))


async def _prompt_scores(hostile: Hostile, number: int) -> None:
    """The first kind is refused, as too large an answer; of the other two nothing larger is served."""
    rows, scores = ((32, 20), (32, 0), (2, 20))[number % 3]
    prompts = [[10 + (number + row) % 80] * 8_000 for row in range(rows)]
    await hostile.post(TEXTS, _text(prompt=prompts, max_tokens=1, prompt_logprobs=scores))


async def _many_logprobs(hostile: Hostile, number: int) -> None:
    await hostile.post(TEXTS, _text(n=8, max_tokens=2_000, logprobs=20, ignore_eos=True, seed=number))


async def _bad_words(hostile: Hostile, number: int) -> None:
    words = [f"{number} {place} {'zyxw ' * 50}"[:250] for place in range(500)]
    await hostile.post(TEXTS, _text(max_tokens=1, bad_words=words))


async def _detokenize(hostile: Hostile, number: int) -> None:
    await hostile.post("/detokenize", {"model": MODEL, "tokens": [number % 10] * 690_000})


async def _kept_bodies(hostile: Hostile, number: int) -> None:
    await hostile.post(TEXTS, _text(max_tokens=1, detach_seconds=0, user=f"{number} " + "A" * 2_000_000))


async def _detached_streams(hostile: Hostile, number: int) -> None:
    body = _text(max_tokens=2_000, ignore_eos=True, detach_seconds=300, seed=number)
    writer = await hostile.open(body)
    await asyncio.sleep(0.2)  # the client's patience
    if writer is not None:
        writer.transport.abort()


async def _slow_batches(hostile: Hostile, number: int) -> None:
    if number >= 16:
        return await asyncio.sleep(ANSWER_SECONDS)
    body = _text(max_tokens=1_000, ignore_eos=True)
    lines = [{"custom_id": str(row), "method": "POST", "url": TEXTS, "body": body} for row in range(60)]
    file_id = json.loads(await hostile.post("/v1/files", _upload("\n".join(map(json.dumps, lines)).encode())) or b"{}")
    batch = {"input_file_id": file_id.get("id", ""), "endpoint": TEXTS, "completion_window": "24h"}
    await hostile.post("/v1/batches", batch)


async def _uploads(hostile: Hostile, number: int) -> None:
    await hostile.post("/v1/files", _upload(f'{{"{number}":1}}\n'.encode() * 600_000))


async def _slow_readers(hostile: Hostile, number: int) -> None:
    writer = await hostile.open(_text(n=8, max_tokens=2_000, logprobs=20, ignore_eos=True, seed=number))
    if writer is not None:
        await asyncio.sleep(ANSWER_SECONDS)
        writer.transport.abort()


def _text(**fields: object) -> dict[str, object]:
    return {"model": MODEL, "prompt": "x", **fields}


def _upload(content: bytes) -> aiohttp.FormData:
    form = aiohttp.FormData()
    form.add_field("purpose", "batch")
    form.add_field("file", content, filename="in.jsonl")
    return form


PATTERNS = {
    "deep-json": Pattern(_deep_json, 4),
    "grammar-bombs": Pattern(_grammar_bomb, 16),
    "huge-schemas": Pattern(_huge_schema, 16),
    "prompt-scores": Pattern(_prompt_scores, 2),
    "many-logprobs": Pattern(_many_logprobs, 8),
    "bad-words": Pattern(_bad_words, 8),
    "detokenize": Pattern(_detokenize, 8),
    "kept-bodies": Pattern(_kept_bodies, 4),
    "detached-streams": Pattern(_detached_streams, 8),
    "slow-batches": Pattern(_slow_batches, 4),
    "uploads": Pattern(_uploads, 8),
    "slow-readers": Pattern(_slow_readers, 32),
}


async def attack(pattern: Pattern, url: str, key: str, seconds: float, turns: int) -> Counter[str]:
    """At most `turns`, for at most `seconds`."""
    timeout = aiohttp.ClientTimeout(total=ANSWER_SECONDS)
    connector, headers = aiohttp.TCPConnector(limit=0), {"Authorization": f"Bearer {key}"}
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, headers=headers) as session:
        hostile, numbers, until = Hostile(session, url, key), itertools.count(), time.monotonic() + seconds

        async def again_and_again() -> None:
            while (number := next(numbers)) < turns and time.monotonic() < until:
                await pattern.turn(hostile, number)

        with_all = asyncio.gather(*(again_and_again() for _ in range(pattern.at_once)))
        await asyncio.wait([asyncio.ensure_future(with_all)], timeout=seconds)
        with_all.cancel()
        await asyncio.gather(with_all, return_exceptions=True)
        return hostile.answers


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("pattern", choices=PATTERNS)
    parser.add_argument("--url", required=True)
    parser.add_argument("--key", required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--turns", type=int, required=True)
    options = parser.parse_args()
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    _json_bodies()
    print("begun", flush=True)
    answers = asyncio.run(attack(PATTERNS[options.pattern], options.url, options.key, options.seconds, options.turns))
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
