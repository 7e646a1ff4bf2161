"""Send several times more requests than the worker can process.

    python -m bench overload --model DIR

The benchmark starts its own store, gateway and scripted worker. Requests arrive at `--factor` times the worker's rate.
The result has how fast and with which status the surplus is rejected, and when accepted requests complete. With
--queue-timeout-seconds the queue has no other limit, and some accepted requests may end with queue_timeout; the goodput
is then the part of the worker's capacity that went into whole answers. Without it the exit status is 1 if an accepted
request is incomplete.
"""

import argparse
import asyncio
import time
from collections import Counter
from pathlib import Path
from typing import Any

from bench.provenance import provenance
from bench.serving.load_report import tell
from bench.serving.own_fleet import MODEL, own_fleet
from bench.serving.raw_stream import RawStream, read_stream
from bench.statistics import distribution

SEATS, OUTPUT_TOKENS, STEP_SECONDS = 16, 25, 0.02
CAPACITY_A_SECOND = SEATS / (OUTPUT_TOKENS * STEP_SECONDS)
QUEUED = 32  # one second of work
UNLIMITED = 100_000


def main(argv: list[str]) -> int:
    options = _parser().parse_args(argv)
    result = {**provenance(["overload", *argv]), **asyncio.run(_measure(options))}
    tell(result, options.json)
    return 1 if result["accepted_and_not_whole"] and not options.queue_timeout_seconds else 0


async def _measure(options: argparse.Namespace) -> dict[str, Any]:
    rate = options.factor * CAPACITY_A_SECOND
    worker = ["--step-seconds", str(STEP_SECONDS), "--max-num-seqs", str(SEATS)]
    limits = ["--max-num-queued-reqs", str(QUEUED)]
    if options.queue_timeout_seconds:
        limits = ["--max-num-queued-reqs", str(UNLIMITED)]
        limits += ["--default-queue-timeout-seconds", str(options.queue_timeout_seconds)]
    async with own_fleet(options.model, worker, gateway_flags=limits) as fleet:
        await read_stream(*fleet.address, _body(0))  # warm-up for what is loaded on first use
        begin = time.monotonic()
        tasks: list[asyncio.Task[Any]] = []
        while (elapsed_seconds := time.monotonic() - begin) < options.seconds:
            for number in range(len(tasks), int(elapsed_seconds * rate)):
                tasks.append(asyncio.create_task(read_stream(*fleet.address, _body(number))))
            await asyncio.sleep(0.002)
        streams = await asyncio.gather(*tasks)
    accepted = [stream for stream in streams if stream.status == 200]
    refused = [stream for stream in streams if stream.status in (429, 503)]
    events = [stream.events() for stream in accepted]
    broken = [
        f"{request_id}: {len(tokens)} tokens, done {done} {stream.failure}"
        for stream, (request_id, tokens, done) in zip(accepted, events, strict=True)
        if len(tokens) - OUTPUT_TOKENS not in (0, 1) or not done
    ]
    answered = [stream for stream, (_, tokens, _) in zip(accepted, events, strict=True) if tokens]
    return {
        "requests_a_second": rate,
        "capacity_a_second": CAPACITY_A_SECOND,
        "goodput": (len(accepted) - len(broken)) / CAPACITY_A_SECOND / (time.monotonic() - begin),
        "statuses": dict(Counter(stream.status for stream in streams)),
        "accepted_and_not_whole": broken,
        "accepted": len(accepted),
        "unanswered": sorted({stream.failure for stream in streams if not stream.status}),
        "refusal_seconds": _times(refused, [stream.answered_at for stream in refused]),
        "first_token_seconds": _times(answered, [tokens[0][0] for _, tokens, _ in events if tokens]),
        "last_token_seconds": _times(answered, [tokens[-1][0] for _, tokens, _ in events if tokens]),
    }


def _times(streams: list[RawStream], moments: list[float]) -> dict[str, float]:
    return distribution([moment - stream.sent_at for stream, moment in zip(streams, moments, strict=True)])


def _body(number: int) -> dict[str, object]:
    body = {"model": MODEL, "prompt": [1_000 + number % 40_000, 5, 6], "max_tokens": OUTPUT_TOKENS}
    return body | {"temperature": 0, "ignore_eos": True, "stream": True}


def _parser() -> argparse.ArgumentParser:
    summary = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m bench overload", description=summary)
    parser.add_argument(
        "--model", metavar="PATH", type=Path, required=True, help="model directory; only its tokenizer is used"
    )
    parser.add_argument(
        "--factor",
        metavar="RATIO",
        type=float,
        default=5.0,
        help="request rate as a multiple of the worker's (default: %(default)s)",
    )
    parser.add_argument(
        "--queue-timeout-seconds", metavar="SECONDS", type=float, default=0.0, help="of each request; default: none"
    )
    parser.add_argument("--seconds", metavar="SECONDS", type=float, default=20.0)
    parser.add_argument("--json", metavar="PATH", type=Path, help="file for all figures")
    return parser
