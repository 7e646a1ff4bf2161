"""python -m bench affinity --model DIR: how often workers on one queue have a prompt's beginning in their caches.

Conversations of several turns run at the same time, each with its own beginning; the next turn repeats everything so
far. The same cache memory is given to one worker, to --workers without prefix affinity, and to --workers with it. Each
result has the cached part of all prompt tokens, that of the turns after the first, the computed prompt tokens relative
to one worker, and the requests of the busiest worker relative to the mean. Then all prompts have one beginning, which
must not cost throughput (median of pairs in turn). The workers are scripted (scripted_worker.py), with steps of 5 ms
and 20 us per token. Exits with 1 if a figure misses its limit.
"""

import argparse
import asyncio
import json
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
from redis.asyncio import Redis

from bench.provenance import provenance
from bench.serving.load_report import tell
from bench.serving.own_fleet import MODEL, FleetSize, OwnFleet, own_fleet
from bench.statistics import distribution
from shared.redis_keys import RedisKeys

SLOTS, STEP_SECONDS, TOKEN_SECONDS = 32, 0.005, 2e-5
BLOCK_SIZE = 16
CACHE_RATIO = 1.15  # cache memory of all workers together relative to the tokens of all conversations
HOT_PAIRS = 11  # default: one pair gave 0.78 to 1.33 on a busy machine, and the median of 5 gave 0.94 to 1.08
HOT_REQUESTS, HOT_AT_ONCE, HOT_PREFIX_TOKENS = 600, 64, 1_024
MIN_HIT, MIN_LATER_HIT, MAX_COMPUTED, MAX_OVER_MEAN, MIN_HOT = 0.74, 0.81, 1.10, 1.25, 0.98


@dataclass
class Counts:
    """Prompt tokens of the first turns and of the later ones, the cached part of both, and the requests by worker."""

    prompt: Counter[str] = field(default_factory=Counter)
    cached: Counter[str] = field(default_factory=Counter)
    by_worker: Counter[str] = field(default_factory=Counter)
    first_token_seconds: list[float] = field(default_factory=list)  # of later turns

    def add(self, turn: int, answer: "Answer", worker: str) -> None:
        usage = answer.usage
        if turn:
            self.first_token_seconds.append(answer.first_token_seconds)
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
            "later_first_token_seconds": distribution(self.first_token_seconds),
            "most_over_mean": max(self.by_worker.values()) * len(self.by_worker) / self.by_worker.total(),
        }


@dataclass
class Answer:
    request_id: str = ""
    token_ids: list[int] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)
    first_token_seconds: float = 0.0


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
        "hot_prefix_ratio": result.get("hot_prefix_ratio", MIN_HOT) < MIN_HOT,
    }
    return [name for name, is_missed in missed.items() if is_missed]


async def _measure(options: argparse.Namespace) -> dict[str, Any]:
    one = (await _conversations(options, workers=1, affinity=True)).summary()
    off = (await _conversations(options, workers=options.workers, affinity=False)).summary()
    on = (await _conversations(options, workers=options.workers, affinity=True)).summary()
    return {
        "one_worker": one,
        "no_affinity": off,
        "affinity": on,
        "computed_over_one_worker": on["computed_tokens"] / one["computed_tokens"],
        "computed_over_one_worker_without": off["computed_tokens"] / one["computed_tokens"],
        "later_first_token_ratio": {
            quantile: on["later_first_token_seconds"][quantile] / off["later_first_token_seconds"][quantile]
            for quantile in ("p50", "p99")
        },
        **await _hot_prefix_figures(options),
    }


def _fleet(options: argparse.Namespace, workers: int, num_blocks: int, affinity: bool) -> Any:
    pace = ["--step-seconds", str(STEP_SECONDS), "--token-seconds", str(TOKEN_SECONDS)]
    scripted = [*pace, "--num-blocks", str(num_blocks), "--max-num-seqs", str(SLOTS)]
    memory = ["--kv-cache-memory-bytes", str(num_blocks * BLOCK_SIZE * options.kv_bytes_per_token)]
    return own_fleet(
        options.model.resolve(),
        [*memory, *options.worker_flags.split()] if options.real else scripted,
        size=FleetSize(workers=workers),
        worker="engine_worker" if options.real else "bench.serving.scripted_worker",
        gateway_flags=["--prefix-affinity" if affinity else "--no-prefix-affinity"],
    )  # fmt: skip


async def _conversations(options: argparse.Namespace, *, workers: int, affinity: bool) -> Counts:
    later = (options.turns - 1) * (options.more_tokens + options.output_tokens)
    last_tokens = options.first_tokens + later + options.output_tokens
    num_blocks = int(CACHE_RATIO * options.conversations * last_tokens / BLOCK_SIZE / workers)
    counts = Counts()
    async with (
        _fleet(options, workers, num_blocks, affinity) as fleet,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session,
        Redis.from_url(fleet.store_url) as store,
    ):
        await asyncio.gather(*(
            _converse(fleet, session, store, random.Random(number), options, counts)
            for number in range(options.conversations)
        ))  # fmt: skip
    return counts


async def _converse(
    fleet: OwnFleet,
    session: aiohttp.ClientSession,
    store: Redis,
    source: random.Random,
    options: argparse.Namespace,
    counts: Counts,
) -> None:
    token_ids = source.choices(range(100, 40_000), k=options.first_tokens)
    for turn in range(options.turns):
        await asyncio.sleep(source.expovariate(1 / options.think_seconds))
        answer = await _answer(fleet, session, token_ids, options.output_tokens)
        key = RedisKeys(MODEL).request(answer.request_id)
        worker: Any = await store.hget(key, "worker")
        counts.add(turn, answer, (worker or b"?").decode())
        token_ids += answer.token_ids + source.choices(range(100, 40_000), k=options.more_tokens)


async def _hot_prefix_figures(options: argparse.Namespace) -> dict[str, Any]:
    pairs = [await _hot_pair(options, is_affinity_first=number % 2 == 1) for number in range(options.hot_pairs)]
    if not pairs:
        return {}
    return {
        "hot_prefix_requests_per_second": dict(zip(("no_affinity", "affinity"), zip(*pairs, strict=True), strict=True)),
        "hot_prefix_ratio": median(of_affinity / without for without, of_affinity in pairs),
    }


async def _hot_pair(options: argparse.Namespace, *, is_affinity_first: bool) -> tuple[float, float]:
    """Return the requests per second without affinity and with it. The caller alternates which is measured first."""
    found = {
        affinity: await _hot_prefix(options, affinity=affinity)
        for affinity in (is_affinity_first, not is_affinity_first)
    }
    return found[False], found[True]


async def _hot_prefix(options: argparse.Namespace, *, affinity: bool) -> float:
    """Return requests per second when all prompts begin alike."""
    source = random.Random(1)
    prefix = source.choices(range(100, 40_000), k=HOT_PREFIX_TOKENS)
    prompts = [prefix + source.choices(range(100, 40_000), k=options.more_tokens) for _ in range(HOT_REQUESTS)]
    places = asyncio.Semaphore(HOT_AT_ONCE)
    async with (
        _fleet(options, options.workers, 20_000, affinity) as fleet,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session,
    ):

        async def send(prompt: list[int]) -> None:
            async with places:
                await _answer(fleet, session, prompt, options.output_tokens)

        await asyncio.gather(*map(send, prompts[:HOT_AT_ONCE]))  # warm-up
        began_at = time.perf_counter()
        await asyncio.gather(*map(send, prompts))
        return HOT_REQUESTS / (time.perf_counter() - began_at)


async def _answer(fleet: OwnFleet, session: aiohttp.ClientSession, prompt: list[int], max_tokens: int) -> Answer:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "return_token_ids": True}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    answer, began_at = Answer(), time.perf_counter()
    async with session.post(fleet.url + "/v1/completions", json=body) as reply:
        reply.raise_for_status()
        async for line in reply.content:
            if not line.startswith(b"data: {"):
                continue
            chunk = json.loads(line[6:])
            answer.request_id = chunk["id"].rpartition("-")[2]
            answer.usage = chunk.get("usage") or answer.usage
            for choice in chunk["choices"]:
                answer.first_token_seconds = answer.first_token_seconds or time.perf_counter() - began_at
                answer.token_ids += choice.get("token_ids") or []
    return answer


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench affinity", description=(__doc__ or "").partition(": ")[2])
    parser.add_argument("--model", type=Path, required=True, metavar="PATH", help="model directory, for its tokenizer")
    parser.add_argument("--workers", type=int, default=4, metavar="N")
    parser.add_argument("--conversations", type=int, default=32, metavar="N")
    parser.add_argument("--turns", type=int, default=6, metavar="N")
    parser.add_argument("--first-tokens", type=int, default=480, metavar="N", help="of a first prompt (%(default)s)")
    parser.add_argument("--more-tokens", type=int, default=100, metavar="N", help="added by each turn (%(default)s)")
    parser.add_argument("--output-tokens", type=int, default=64, metavar="N", help="of each answer (%(default)s)")
    parser.add_argument(
        "--think-seconds", type=float, default=0.4, metavar="SECONDS", help="mean pause between turns (%(default)s)"
    )
    parser.add_argument(
        "--hot-pairs", type=int, default=HOT_PAIRS, metavar="N", help="measurements with one beginning (%(default)s)"
    )
    parser.add_argument("--real", action="store_true", help="engine workers")
    parser.add_argument("--worker-flags", default="", metavar="FLAGS", help="of the engine workers, in one argument")
    parser.add_argument(
        "--kv-bytes-per-token", type=int, default=131_072, metavar="BYTES", help="of the engine's cache (%(default)s)"
    )
    parser.add_argument("--json", metavar="PATH", type=Path, help="file for all figures")
    return parser
