"""Measure how soon the KV of clients that disconnect at a random time is free.

    python -m bench disconnects --model DIR

The benchmark starts its own store, gateway and scripted worker. The worker logs when its engine drops a request, which
frees its blocks in the same call. The result has the time from the client's close() to that, in seconds and steps, and
the requests and blocks left at the end. The exit status is 1 if any are left.
"""

import argparse
import asyncio
import random
import time
from pathlib import Path
from typing import Any

import redis

from bench.provenance import provenance
from bench.serving.load_report import tell
from bench.serving.own_fleet import MODEL, OwnFleet, own_fleet
from bench.serving.raw_stream import RawStream, open_stream
from bench.statistics import distribution
from shared.messages import decode_heartbeat
from shared.redis_keys import RedisKeys

STEP_SECONDS = 0.05
OUTPUT_TOKENS = 2000  # no stream ends by itself
LONGEST_STAY_SECONDS = 1.0
SETTLE_SECONDS = 5.0


def main(argv: list[str]) -> int:
    options = _parser().parse_args(argv)
    result = {**provenance(["disconnects", *argv]), **asyncio.run(_measure(options))}
    tell(result, options.json)
    return 1 if result["left_running"] or result["left_waiting"] or result["blocks_not_free"] else 0


async def _measure(options: argparse.Namespace) -> dict[str, Any]:
    source = random.Random(options.seed)
    worker = ["--step-seconds", str(STEP_SECONDS), "--max-num-seqs", str(options.concurrency)]
    log = options.log_aborts.resolve()
    async with own_fleet(options.model, [*worker, "--log-aborts", str(log)]) as fleet:
        closed_at: dict[str, float] = {}
        share = [options.disconnects // options.concurrency] * options.concurrency
        share[0] += options.disconnects - sum(share)
        await asyncio.gather(*(_leave_again_and_again(fleet, source, count, closed_at) for count in share))
        await asyncio.sleep(SETTLE_SECONDS)  # much longer than a step and a heartbeat
        left = await asyncio.to_thread(_worker_state, fleet.store_url)
    aborted_at = {id_: float(at) for id_, at in (line.split() for line in log.read_text().splitlines())}
    delays = [aborted_at[id_] - at for id_, at in closed_at.items() if id_ in aborted_at]
    return {
        "disconnects": options.disconnects,
        "of_requests_that_had_begun": len(closed_at),
        "found_in_the_log": len(delays),
        "seconds_to_free": distribution(delays),
        "steps_to_free": distribution([delay / STEP_SECONDS for delay in delays]),
        **left,
    }


async def _leave_again_and_again(
    fleet: OwnFleet, source: random.Random, count: int, closed_at: dict[str, float]
) -> None:
    for number in range(count):
        body: dict[str, object] = {"model": MODEL, "prompt": [source.randrange(1_000, 40_000), 5], "stream": True}
        body |= {"max_tokens": OUTPUT_TOKENS, "temperature": 0, "ignore_eos": True}
        stream = RawStream()
        reader, writer = await open_stream(*fleet.address, body, stream)
        await asyncio.sleep(source.uniform(0, LONGEST_STAY_SECONDS))  # time until the client disconnects
        piece = await reader.read(4096) if number % 4 else b""  # one in four disconnects without reading
        stream.pieces.append((time.monotonic(), piece))
        writer.transport.abort()
        request_id, _, _ = stream.events()
        if request_id:
            closed_at[request_id] = time.monotonic()


def _worker_state(store_url: str) -> dict[str, int]:
    """Return the state in the next heartbeat."""
    with redis.Redis.from_url(store_url) as store, store.pubsub(ignore_subscribe_messages=True) as channel:
        channel.subscribe(RedisKeys(MODEL).heartbeat_channel)
        message = None
        while message is None:
            message = channel.get_message(timeout=5.0)
    beat = decode_heartbeat(message["data"])
    return {
        "left_running": beat.running,
        "left_waiting": beat.waiting,
        "blocks_not_free": beat.kv_blocks_total - beat.kv_blocks_free,
    }


def _parser() -> argparse.ArgumentParser:
    summary = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m bench disconnects", description=summary)
    parser.add_argument(
        "--model", metavar="PATH", type=Path, required=True, help="model directory; only its tokenizer is used"
    )
    parser.add_argument("--disconnects", metavar="N", type=int, default=10_000)
    parser.add_argument("--concurrency", metavar="N", type=int, default=32)
    parser.add_argument("--seed", metavar="N", type=int, default=1)
    parser.add_argument(
        "--log-aborts",
        metavar="PATH",
        type=Path,
        default=Path("aborts.log"),
        help="file that the worker logs aborts to (default: %(default)s)",
    )
    parser.add_argument("--json", metavar="PATH", type=Path, help="file for all figures")
    return parser
