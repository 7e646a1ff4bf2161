"""Run many slow streams through one gateway for a minute.

    python -m bench gateway-load --model DIR

The benchmark starts its own store, gateway and scripted worker. Each token encodes the end of its step, so the delay to
the client is known per token. Each client's text is compared with the journal of its request. The result has
mismatches, delivery delay, the gateway's CPU time per token, its memory, and the memory's slope over the second half.
`--streams 4000 --tokens-per-second 1` shows the memory of many streams. The exit status is 1 on a mismatch.
"""

import argparse
import asyncio
import gc
import time
from pathlib import Path
from typing import Any

import redis
from tokenizers import Tokenizer

from bench.provenance import provenance
from bench.serving.load_report import tell
from bench.serving.own_fleet import MODEL, OwnFleet, own_fleet
from bench.serving.raw_stream import RawStream, read_stream
from bench.serving.scripted_worker import TIME_BASE, TIME_MODULUS
from bench.statistics import distribution
from shared.messages import journal_choices
from shared.redis_keys import RedisKeys

PROMPT_TOKENS = 20
OPENED_A_SECOND = 400
SAMPLE_SECONDS = 0.5


def main(argv: list[str]) -> int:
    options = _parser().parse_args(argv)
    gc.disable()  # everything received is kept: a collection would add 70 ms of delay
    try:
        result = {**provenance(["gateway-load", *argv]), **asyncio.run(_measure(options))}
    finally:
        gc.enable()
    tell(result, options.json)
    return 1 if result["mismatches"] else 0


async def _measure(options: argparse.Namespace) -> dict[str, Any]:
    count = options.streams
    worker = ["--tell-time", "--step-seconds", str(1 / options.tokens_per_second), "--max-num-seqs", str(count)]
    limits = ["--max-num-streams", str(count), "--max-num-queued-reqs", str(count)]
    async with own_fleet(options.model, worker, gateway_flags=limits) as fleet:
        await _read_all(fleet, 1, 1)  # warm-up for what is loaded on first use
        samples: list[tuple[float, int]] = []  # (time.monotonic, bytes)
        memory = asyncio.create_task(_sample_memory(fleet, samples))
        before = fleet.cpu_seconds()
        num_tokens = round(options.seconds * options.tokens_per_second)
        streams = await _read_all(fleet, count, num_tokens)
        spent = {name: seconds - before[name] for name, seconds in fleet.cpu_seconds().items()}
        memory.cancel()
        tokenizer = Tokenizer.from_file(str(options.model / "tokenizer.json"))
        with redis.Redis.from_url(fleet.store_url) as store:
            delays, mismatches = _compare(streams, store, tokenizer, num_tokens)
        return {
            "streams": count,
            "tokens_a_stream": num_tokens,
            "mismatches": mismatches,
            "delivery_seconds": distribution(delays),
            "microseconds_of_cpu_a_token": {name: 1e6 * cpu / count / num_tokens for name, cpu in spent.items()},
            **_memory_report(samples, count),
        }


async def _read_all(fleet: OwnFleet, count: int, num_tokens: int) -> list[RawStream]:
    host, port = fleet.address
    tasks = []
    for number in range(count):
        prompt = [1_000 + (number * 7 + position) % 40_000 for position in range(PROMPT_TOKENS)]
        body: dict[str, object] = {"model": MODEL, "prompt": prompt, "max_tokens": num_tokens}
        body |= {"temperature": 0, "ignore_eos": True, "stream": True}
        tasks.append(asyncio.create_task(read_stream(host, port, body)))
        await asyncio.sleep(1 / OPENED_A_SECOND)
    return await asyncio.gather(*tasks)


async def _sample_memory(fleet: OwnFleet, samples: list[tuple[float, int]]) -> None:
    gateway = fleet.processes["gateway 0"]
    while True:
        samples.append((time.monotonic(), gateway.memory_info().rss))
        await asyncio.sleep(SAMPLE_SECONDS)


def _compare(
    streams: list[RawStream], store: redis.Redis, tokenizer: Tokenizer, num_tokens: int
) -> tuple[list[float], list[str]]:
    """Return (delay of every token from the end of its step in seconds, errors of streams)."""
    delays: list[float] = []
    mismatches = []
    for stream in streams:
        request_id, tokens, done = stream.events()
        journal = store.get(RedisKeys(MODEL).journal(request_id)) if request_id else None
        token_ids = journal_choices(journal, 1)[0].token_ids if isinstance(journal, bytes) else []
        text = "".join(text for _, text in tokens)
        if stream.failure or not done or len(tokens) - num_tokens not in (0, 1) or text != tokenizer.decode(token_ids):
            mismatches.append(f"{request_id}: {stream.status} {stream.failure} {len(tokens)} tokens, done {done}")
            continue
        delays += [_delay(at, token_id) for (at, _), token_id in zip(tokens, token_ids, strict=False)]
    return delays, mismatches


def _delay(arrived_at: float, token_id: int) -> float:
    milliseconds = (1000 * arrived_at - (token_id - TIME_BASE)) % TIME_MODULUS
    return milliseconds / 1000


def _memory_report(samples: list[tuple[float, int]], streams: int) -> dict[str, Any]:
    half = samples[len(samples) // 2 : -2]  # while all streams are open
    return {
        "gateway_rss_bytes": {"before": samples[0][1], "peak": max(size for _, size in samples)},
        "gateway_rss_bytes_a_stream": (max(size for _, size in samples) - samples[0][1]) / streams,
        "gateway_rss_slope_bytes_a_second": _slope(half),
    }


def _slope(samples: list[tuple[float, int]]) -> float:
    """Return the least-squares slope."""
    mean_x = sum(x for x, _ in samples) / len(samples)
    mean_y = sum(y for _, y in samples) / len(samples)
    spread = sum((x - mean_x) ** 2 for x, _ in samples)
    return sum((x - mean_x) * (y - mean_y) for x, y in samples) / spread if spread else 0.0


def _parser() -> argparse.ArgumentParser:
    summary = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m bench gateway-load", description=summary)
    parser.add_argument(
        "--model", metavar="PATH", type=Path, required=True, help="model directory; only its tokenizer is used"
    )
    parser.add_argument("--streams", metavar="N", type=int, default=1000)
    parser.add_argument(
        "--tokens-per-second", metavar="N", type=float, default=10.0, help="rate of each stream (default: %(default)s)"
    )
    parser.add_argument("--seconds", metavar="SECONDS", type=float, default=60.0)
    parser.add_argument("--json", metavar="PATH", type=Path, help="file for all figures")
    return parser
