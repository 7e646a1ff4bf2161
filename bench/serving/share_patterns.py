"""Patterns of one API key that takes more than its share of queue places, running slots, memory, or connections.

The first tokens of another key are compared with those beside the same load of honest keys.
"""

import asyncio
import zlib
from functools import lru_cache

from bench.serving.hostile_client import Hostile, Pattern
from bench.serving.own_fleet import MODEL

TEXTS = "/v1/completions"
BODY_BYTES = 2 * 2**20
KEPT_SECONDS = 300
SLOTS = ("--max-num-seqs", "64")
LONG_PROMPT_TOKENS, NUM_LONG_PROMPTS = 1_500, 14


async def _many_bodies(hostile: Hostile, number: int) -> None:
    await hostile.post_prompts(32, number, max_tokens=2_000)


async def _one_wide_body(hostile: Hostile, number: int) -> None:
    await hostile.post_prompts(32, number, n=2, max_tokens=1_500)


async def _unfinished_bodies(hostile: Hostile, number: int) -> None:
    head = f"POST {TEXTS} HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: {BODY_BYTES}"
    await hostile.hold(head, b" " * (BODY_BYTES - 1), number=number)


async def _slow_kept_readers(hostile: Hostile, number: int) -> None:
    """Read a kept answer of 4 MB of the same key, slowly."""
    name = await _kept_answer(hostile, number, prompt=[[7] * 3_000], max_tokens=1, prompt_logprobs=20)
    await hostile.hold(f"GET /v1/requests/{name} HTTP/1.1", number=number)


async def _attaches(hostile: Hostile, number: int) -> None:
    name = await _kept_answer(hostile, number, prompt="x", max_tokens=4_000, stream=False, background=True)
    await hostile.hold(f"GET /v1/requests/{name}/events HTTP/1.1", number=number)


async def _kept_answer(hostile: Hostile, number: int, **fields: object) -> str:
    """Return the id of the key's kept answer, which its first turn requests."""
    key = hostile.key(number)
    if key not in hostile.kept:
        hostile.kept[key] = asyncio.create_task(_asked_kept(hostile, number, fields))
    return await asyncio.shield(hostile.kept[key])


async def _asked_kept(hostile: Hostile, number: int, fields: dict[str, object]) -> str:
    is_running = bool(fields.pop("background", False))
    body = {"model": MODEL, "ignore_eos": True, "detach_seconds": KEPT_SECONDS, **fields}
    headers = {"Authorization": f"Bearer {hostile.key(number)}"}
    if is_running:
        body["stream"] = True
    async with hostile.session.post(hostile.url + TEXTS, json=body, headers=headers) as answer:
        hostile.answers[str(answer.status)] += 1
        if not is_running:
            await answer.read()
        return answer.headers.get("Content-Location", "/none").rpartition("/")[2]


async def _cancelled_body(hostile: Hostile, number: int) -> None:
    """Send 32 prompts and disconnect at once, then send long prompts."""
    cancelled = asyncio.create_task(hostile.post_prompts(32, number, max_tokens=2_000))
    await asyncio.sleep(0.05)
    cancelled.cancel()
    await asyncio.gather(cancelled, return_exceptions=True)
    prompts = [[[20 + (number + place) % 80] * LONG_PROMPT_TOKENS] for place in range(NUM_LONG_PROMPTS)]
    await asyncio.gather(*(
        hostile.post(TEXTS, {"model": MODEL, "prompt": prompt, "max_tokens": 1}, number=place)
        for place, prompt in enumerate(prompts)
    ))  # fmt: skip


@lru_cache
def _bomb() -> bytes:
    """Return 2 GB of zeros in 2 MB."""
    packer, zeros = zlib.compressobj(9, wbits=31), bytes(2**20)
    return b"".join([*(packer.compress(zeros) for _ in range(2_000)), packer.flush()])


async def _gzip_bombs(hostile: Hostile, number: int) -> None:
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nContent-Type: application/json\r\nContent-Encoding: gzip\r\n"
        f"Content-Length: {len(_bomb())}"
    )
    await hostile.hold(head, _bomb(), number=number)


SHARE_PATTERNS = {
    "many-bodies": Pattern(_many_bodies, 33, 33, SLOTS, divides=True),
    "one-wide-body": Pattern(_one_wide_body, 1, 1, SLOTS, max_concurrent=1, divides=True),
    "unfinished-bodies": Pattern(_unfinished_bodies, 600, 600, divides=True),
    "slow-kept-readers": Pattern(_slow_kept_readers, 150, 150, divides=True),
    "attaches": Pattern(_attaches, 2_000, 2_000, divides=True),
    "cancelled-body": Pattern(_cancelled_body, 1, worker_flags=(*SLOTS, "--token-seconds", "2e-5"), divides=True),
    "gzip-bombs": Pattern(_gzip_bombs, 8, 8, divides=True, max_livez_seconds=0.15),
}
