"""python -m bench affinity --model DIR: how often workers on one queue have a prompt's beginning in their caches.

Conversations of several turns run at the same time, each with its own beginning; the next turn repeats everything so
far. The same cache memory is given to one worker, to --workers without prefix affinity, and to --workers with it. Each
result has the cached part of all prompt tokens, that of the turns after the first, the computed prompt tokens relative
to one worker, and the requests of the busiest worker relative to the mean. Then all prompts have one beginning, which
must not cost throughput. The workers are scripted (scripted_worker.py), with steps of 5 ms and 20 us per token. Exits
with 1 if a figure misses its limit.
"""

import argparse
import asyncio
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from redis.asyncio import Redis

from bench.provenance import provenance
from bench.serving.load_report import tell
from bench.serving.own_fleet import MODEL, FleetSize, OwnFleet, own_fleet
from shared.redis_keys import RedisKeys

FIRST_TOKENS, MORE_TOKENS, OUTPUT_TOKENS = 480, 100, 64
THINK_SECONDS = 0.4  # mean pause between two turns
SLOTS, STEP_SECONDS, TOKEN_SECONDS = 32, 0.005, 2e-5
BLOCK_SIZE = 16
CACHE_RATIO = 1.15  # cache memory of all workers together relative to the tokens of all conversations
HOT_REQUESTS, HOT_AT_ONCE, HOT_PREFIX_TOKENS = 600, 64, 1_024
MIN_HIT, MIN_LATER_HIT, MAX_COMPUTED, MAX_OVER_MEAN, MIN_HOT = 0.74, 0.81, 1.10, 1.25, 0.98


@dataclass
class Counts:
    """Prompt tokens of the first turns and of the later ones, the cached part of both, and the requests by worker."""

    prompt: Counter[str] = field(default_factory=Counter)
    cached: Counter[str] = field(default_factory=Counter)
    by_worker: Counter[str] = field(default_factory=Counter)

    def add(self, turn: int, usage: dict[str, Any], worker: str) -> None:
        part = "later" if turn else "first"
        self.prompt[part] += usage["prompt_tokens"]
        self.cached[part] += (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        self.by_worker[worker] += 1

    def summary(self) -> dict[str, Any]:
        total = self.prompt.total()
        return {
            "hit": self.cached.total() / total,
            "hit_after_first_turn": self.cached["later"] / self.prompt["later"],
            "computed_tokens": total - self.cached.total(),
            "most_over_mean": max(self.by_worker.values()) * len(self.by_worker) / self.by_worker.total(),
        }


def main(argv: list[str]) -> int:
    options = _parser().parse_args(argv)
    result = {**provenance(["affinity", *argv]), **asyncio.run(_measure(options))}
    result["misses"] = misses_of(result)
    tell(result, options.json)
    return 1 if result["misses"] else 0


def misses_of(result: dict[str, Any]) -> list[str]:
    """Return the names of the figures that miss their limits."""
    found = result["affinity"]
    missed = {
        "hit": found["hit"] < MIN_HIT,
        "hit_after_first_turn": found["hit_after_first_turn"] < MIN_LATER_HIT,
        "computed_over_one_worker": result["computed_over_one_worker"] > MAX_COMPUTED,
        "most_over_mean": found["most_over_mean"] > MAX_OVER_MEAN,
        "hot_prefix_ratio": result["hot_prefix_ratio"] < MIN_HOT,
    }
    return [name for name, is_missed in missed.items() if is_missed]


async def _measure(options: argparse.Namespace) -> dict[str, Any]:
    one = (await _conversations(options, workers=1, affinity=True)).summary()
    off = (await _conversations(options, workers=options.workers, affinity=False)).summary()
    on = (await _conversations(options, workers=options.workers, affinity=True)).summary()
    hot = [await _hot_prefix(options, affinity=affinity) for affinity in (False, True)]
    return {
        "one_worker": one,
        "no_affinity": off,
        "affinity": on,
        "computed_over_one_worker": on["computed_tokens"] / one["computed_tokens"],
        "computed_over_one_worker_without": off["computed_tokens"] / one["computed_tokens"],
        "hot_prefix_requests_per_second": dict(zip(("no_affinity", "affinity"), hot, strict=True)),
        "hot_prefix_ratio": hot[1] / hot[0],
    }


def _fleet(options: argparse.Namespace, workers: int, num_blocks: int, affinity: bool) -> Any:
    pace = ["--step-seconds", str(STEP_SECONDS), "--token-seconds", str(TOKEN_SECONDS)]
    flags = [*pace, "--num-blocks", str(num_blocks), "--max-num-seqs", str(SLOTS)]
    return own_fleet(
        options.model.resolve(), flags, size=FleetSize(workers=workers),
        gateway_flags=["--prefix-affinity" if affinity else "--no-prefix-affinity"],
    )  # fmt: skip


async def _conversations(options: argparse.Namespace, *, workers: int, affinity: bool) -> Counts:
    last_tokens = FIRST_TOKENS + (options.turns - 1) * (MORE_TOKENS + OUTPUT_TOKENS) + OUTPUT_TOKENS
    num_blocks = int(CACHE_RATIO * options.conversations * last_tokens / BLOCK_SIZE / workers)
    counts = Counts()
    async with (
        _fleet(options, workers, num_blocks, affinity) as fleet,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session,
        Redis.from_url(fleet.store_url) as store,
    ):
        await asyncio.gather(*(
            _converse(fleet, session, store, random.Random(number), options.turns, counts)
            for number in range(options.conversations)
        ))  # fmt: skip
    return counts


async def _converse(
    fleet: OwnFleet, session: aiohttp.ClientSession, store: Redis, source: random.Random, turns: int, counts: Counts
) -> None:
    token_ids = source.choices(range(100, 40_000), k=FIRST_TOKENS)
    for turn in range(turns):
        await asyncio.sleep(source.expovariate(1 / THINK_SECONDS))
        answer = await _post(fleet, session, token_ids, return_token_ids=True)
        key = RedisKeys(MODEL).request(answer["id"].rpartition("-")[2])
        worker: Any = await store.hget(key, "worker")
        counts.add(turn, answer["usage"], (worker or b"?").decode())
        token_ids += answer["choices"][0]["token_ids"] + source.choices(range(100, 40_000), k=MORE_TOKENS)


async def _hot_prefix(options: argparse.Namespace, *, affinity: bool) -> float:
    """Return requests per second when all prompts begin alike."""
    source = random.Random(1)
    prefix = source.choices(range(100, 40_000), k=HOT_PREFIX_TOKENS)
    prompts = [prefix + source.choices(range(100, 40_000), k=MORE_TOKENS) for _ in range(HOT_REQUESTS)]
    places = asyncio.Semaphore(HOT_AT_ONCE)
    async with (
        _fleet(options, options.workers, 20_000, affinity) as fleet,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session,
    ):

        async def send(prompt: list[int]) -> None:
            async with places:
                await _post(fleet, session, prompt)

        await asyncio.gather(*map(send, prompts[:HOT_AT_ONCE]))  # warm-up
        began_at = time.perf_counter()
        await asyncio.gather(*map(send, prompts))
        return HOT_REQUESTS / (time.perf_counter() - began_at)


async def _post(fleet: OwnFleet, session: aiohttp.ClientSession, prompt: list[int], **fields: object) -> dict[str, Any]:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": OUTPUT_TOKENS, "ignore_eos": True, **fields}
    async with session.post(fleet.url + "/v1/completions", json=body) as reply:
        reply.raise_for_status()
        answer: dict[str, Any] = await reply.json()
        return answer


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench affinity", description=(__doc__ or "").partition(": ")[2])
    parser.add_argument("--model", type=Path, required=True, metavar="PATH", help="model directory, for its tokenizer")
    parser.add_argument("--workers", type=int, default=4, metavar="N")
    parser.add_argument("--conversations", type=int, default=32, metavar="N")
    parser.add_argument("--turns", type=int, default=6, metavar="N")
    parser.add_argument("--json", metavar="PATH", type=Path, help="file for all figures")
    return parser
