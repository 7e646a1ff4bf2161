"""make soak: streams of every kind while processes are killed, paused, drained and cut off at random.

    python -m tests.faults.mix --seconds 600 --streams 500 [--proxies] [--failovers] [--seed N] [--json FILE]

Every client must get the text of an undisturbed server, each choice once, with one end. What it has received is always
a prefix of that text. At the end no queue, pending list or block may hold anything. Prints a report; exits with 1 if a
promise was broken.
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
from tokenizers import Tokenizer

from bench.provenance import provenance
from pagestream.demo_model import ensure_demo_model
from tests.faults.disasters import Disasters
from tests.faults.mixed_requests import MixedRequest, RequestMix
from tests.faults.site import MODEL, Site, running_site
from tests.faults.store_site import running_store_site
from tests.faults.stream_client import Answer, ClientFailed, StreamClient, empty_answer

WORKER_FLAGS = ["--script-step-seconds", "0.05", "--dead-after", "3", "--drain-seconds", "1"]
NUM_WORKERS = 3
PATIENCE_SECONDS = 120.0  # for the last streams after the faults


async def run_mix(
    directory: Path,
    model: Path,
    *,
    seconds: float,
    num_streams: int,
    seed: int,
    least_disasters: int = 0,
    with_proxies: bool = False,
    with_failovers: bool = False,
) -> dict[str, Any]:
    """Run it.

    With proxies, each gateway reaches the store through its own one, which also fails. With failovers, the store is a
    primary and a replica behind haproxy, which fail over and are wiped.
    """
    source = random.Random(seed)
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    mix = RequestMix(random.Random(source.getrandbits(64)), tokenizer, MODEL, max_tokens=200)
    requests = [mix.draw() for _ in range(num_streams)]
    async with AsyncExitStack() as stack:
        stores = stack.enter_context(running_store_site(directory / "stores")) if with_failovers else None
        running = running_site(
            directory,
            model,
            num_workers=NUM_WORKERS,
            worker_flags=WORKER_FLAGS,
            are_gateways_behind_proxies=with_proxies,
            stores=stores,
        )
        site = await stack.enter_async_context(running)
        disasters = Disasters(site, random.Random(source.getrandbits(64)), least_disasters)
        violations: list[str] = []
        results = await _stream_all(site, requests, disasters, source, seconds, violations)
        left = ""
        try:
            await site.nothing_is_left()
        except AssertionError as error:
            left = str(error)
        if left or any(isinstance(result, str) for result in results):
            print(site.fleet.all_logs(), file=sys.stderr)
    return {**_report(seed, requests, results, disasters.counts, left), "violations": violations}


async def _stream_all(
    site: Site,
    requests: list[MixedRequest],
    disasters: Disasters,
    source: random.Random,
    seconds: float,
    violations: list[str],
) -> list[Answer | str]:
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=5, sock_read=60)
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        client = StreamClient(session, site.urls, random.Random(source.getrandbits(64)))
        starts = [source.uniform(0, 0.9 * seconds) for _ in requests]
        streams = [
            asyncio.create_task(_stream(client, request, start, violations))
            for request, start in zip(requests, starts, strict=True)
        ]
        await disasters.run(seconds)
        await asyncio.wait(streams, timeout=PATIENCE_SECONDS)
        for stream in streams:
            stream.cancel()
        ended = await asyncio.gather(*streams, return_exceptions=True)
    return ["no end" if isinstance(result, BaseException) else result for result in ended]


async def _stream(client: StreamClient, request: MixedRequest, start: float, violations: list[str]) -> Answer | str:
    await asyncio.sleep(start)
    answer = empty_answer(request.body)
    try:
        await client.complete(request.body, answer)
    except ClientFailed as failure:
        return str(failure)
    finally:
        violations += request.violations(answer)
    return request.difference(answer) or answer


def _report(
    seed: int, requests: list[MixedRequest], results: list[Answer | str], disasters: Counter[str], left: str
) -> dict[str, Any]:
    answers = [result for result in results if isinstance(result, Answer)]
    silences = sorted(answer.longest_silence_seconds for answer in answers)
    return {
        "seed": seed,
        "streams": dict(Counter(request.kind for request in requests)),
        "complete": len(answers),
        "failures": [result[:2000] for result in results if isinstance(result, str)],
        "left_behind": left,
        "disasters": dict(disasters),
        "refused_and_asked_again": sum(answer.num_refusals for answer in answers),
        "resumed_with_last_event_id": sum(answer.num_resumes for answer in answers),
        "longest_silence_seconds": {"median": statistics.median(silences or [0.0]), "max": max(silences or [0.0])},
    }


def is_whole(report: dict[str, Any]) -> bool:
    return not report["failures"] and not report["left_behind"] and not report["violations"]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.mix", description=(__doc__ or "").partition(": ")[2])
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--streams", type=int, default=500)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--proxies", action="store_true", help="gateways reach the store through proxies that fail too")
    parser.add_argument("--failovers", action="store_true", help="the store fails over and is wiped")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    model = ensure_demo_model(lambda phase, progress, detail: None)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="ps-soak-") as directory:
        report = asyncio.run(
            run_mix(
                Path(directory),
                model,
                seconds=options.seconds,
                num_streams=options.streams,
                seed=options.seed,
                with_proxies=options.proxies,
                with_failovers=options.failovers,
            )
        )
    command = f"python -m tests.faults.mix --seconds {options.seconds:g} --streams {options.streams}"
    command += "".join(f" --{name}" for name in ("proxies", "failovers") if getattr(options, name))
    report = {**provenance(sys.argv[1:]), "command": f"{command} --seed {options.seed}", **report}
    report["took_seconds"] = round(time.monotonic() - started, 1)
    print(json.dumps(report, indent=1))
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0 if is_whole(report) else 1


if __name__ == "__main__":
    sys.exit(main())
