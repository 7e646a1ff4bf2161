"""python -m bench.serving.hostile_patterns NAME --url URL --key KEY: one client that does its worst within its API key.

Twelve patterns are here, and seven in share_patterns.py. Each repeats its turn several times at once until --seconds
or --turns are reached. Prints the number of answers by status. It runs in a separate process with idle priority, except
patterns with little load: real clients run elsewhere, so their cost must not count as a cost of the server.
"""

import argparse
import asyncio
import json
import os
from functools import lru_cache

import aiohttp

from bench.serving.hostile_client import ANSWER_SECONDS, Hostile, Pattern, attack
from bench.serving.own_fleet import MODEL
from bench.serving.share_patterns import SHARE_PATTERNS

BODY_BYTES = 2 * 2**20  # maximum that a gateway accepts
CHATS, TEXTS = "/v1/chat/completions", "/v1/completions"


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
    """Request prompt log-probabilities: the first kind is refused, the other two are the largest that are served."""
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
    await asyncio.sleep(0.2)  # the client gives up
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
    **SHARE_PATTERNS,
}


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("pattern", choices=PATTERNS)
    parser.add_argument("--url", required=True)
    parser.add_argument("--key", required=True, action="append")
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--turns", type=int, required=True)
    options = parser.parse_args()
    pattern = PATTERNS[options.pattern]
    if not pattern.divides:  # patterns with little load would have no effect with idle priority
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        _json_bodies()
    print("begun", flush=True)
    answers = asyncio.run(attack(pattern, options.url, options.key, options.seconds, options.turns))
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
