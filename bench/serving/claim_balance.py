"""Measure how evenly workers share a burst, the share of a late worker, and the cost of a TAKE.

    python -m bench claim-balance [--late-joiner]

The benchmark starts its own store and scripted workers (scripted_worker.py) with real claims, and accepts requests as a
gateway does. The result has requests per worker and maximum over mean; with --late-joiner, the second worker's share
after two seconds of what waited when it started. The exit status is 1 above 1.10, or below 40 %.
"""

import argparse
import asyncio
import contextlib
import os
import random
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bench.provenance import provenance
from bench.serving.load_report import tell
from bench.serving.take_cost import take_costs
from pagestream.embedded_store import EmbeddedStore
from shared.messages import GenerationRequest, SamplingParams, encode
from shared.reaping import list_worker_ids
from shared.redis_client import RedisConnections, connect
from shared.redis_keys import RedisKeys
from shared.redis_scripts import RedisScripts

MODEL = "m"
STORE_BYTES = 2**30
START_SECONDS, CLAIM_SECONDS = 60.0, 60.0
SEATS = 1024
STEP_SECONDS, TOKEN_SECONDS = 0.01, 4e-5  # 20 prompts of 400 tokens fill a step of 0.34 s
PROMPT_TOKENS, OUTPUT_TOKENS = 400, 2_000
HEAD_START_REQUESTS, JOINED_SECONDS = 20, 2.0
MAX_OVER_MEAN, MIN_SHARE = 1.10, 0.40


def main(argv: list[str]) -> int:
    options = _parser().parse_args(argv)
    options.burst = options.burst or (300 if options.late_joiner else 128)
    result = {**provenance(["claim-balance", *argv]), **asyncio.run(_measure(options))}
    tell(result, options.json)
    if options.late_joiner:
        return int(result["joiners_share"] < MIN_SHARE)
    return int(result["most_over_mean"] > MAX_OVER_MEAN)


@dataclass(frozen=True)
class Site:
    directory: Path
    url: str
    connections: RedisConnections
    keys: RedisKeys

    @property
    def scripts(self) -> RedisScripts:
        return RedisScripts(self.connections.commands, self.keys)

    async def accept(self, num_requests: int) -> list[str]:
        source = random.Random(1)
        request_ids = [f"{source.getrandbits(128):032x}" for _ in range(num_requests)]
        bodies = [
            GenerationRequest(
                request_id=request_id,
                prompt_token_ids=source.choices(range(100, 40_000), k=PROMPT_TOKENS),
                sampling=SamplingParams(max_tokens=OUTPUT_TOKENS, seed=1, ignore_eos=True),
            )
            for request_id in request_ids
        ]
        accept = partial(self.scripts.accept, gateway_id="bench", priority_class="interactive")
        await asyncio.gather(*(accept(body.request_id, encode(body)) for body in bodies))
        return request_ids

    async def owners(self, request_ids: list[str]) -> dict[str, str]:
        """Return the claiming worker per request, for claimed requests only."""
        async with self.connections.commands.pipeline(transaction=False) as pipeline:
            for request_id in request_ids:
                pipeline.hget(self.keys.request(request_id), "worker")
            replies = await pipeline.execute()
        return {id_: worker.decode() for id_, worker in zip(request_ids, replies, strict=True) if worker}

    async def unbegun(self, request_ids: list[str]) -> list[str]:
        async with self.connections.commands.pipeline(transaction=False) as pipeline:
            for request_id in request_ids:
                pipeline.strlen(self.keys.journal(request_id))
            lengths = await pipeline.execute()
        return [request_id for request_id, length in zip(request_ids, lengths, strict=True) if not length]

    async def wait_for_workers(self, num_workers: int) -> None:
        async with asyncio.timeout(START_SECONDS):
            while len(await list_worker_ids(self.connections.commands, self.keys)) < num_workers:
                await asyncio.sleep(0.02)


async def _measure(options: argparse.Namespace) -> dict[str, Any]:
    async with _site() as site:
        found = await (_late_joiner(site, options.burst) if options.late_joiner else _burst(site, options))
    async with _site() as site:
        return {**found, "take_microseconds": await take_costs(site.connections.commands, site.keys)}


async def _burst(site: Site, options: argparse.Namespace) -> dict[str, Any]:
    with _running(site, {f"w{number}": [] for number in range(options.workers)}):
        await site.wait_for_workers(options.workers)
        request_ids = await site.accept(options.burst)
        async with asyncio.timeout(CLAIM_SECONDS):
            while len(owners := await site.owners(request_ids)) < options.burst:
                await asyncio.sleep(0.02)
    counts = Counter(worker.partition(".")[0] for worker in owners.values())
    mean = options.burst / options.workers
    return {"requests_by_worker": dict(sorted(counts.items())), "most_over_mean": max(counts.values()) / mean}


async def _late_joiner(site: Site, burst: int) -> dict[str, Any]:
    may_join = site.directory / "may-join"
    with _running(site, {"first": [], "joiner": ["--load-until", str(may_join)]}):
        await site.wait_for_workers(1)
        async with asyncio.timeout(START_SECONDS):
            while not may_join.with_suffix(".loading").exists():
                await asyncio.sleep(0.02)
        request_ids = await site.accept(burst)
        async with asyncio.timeout(CLAIM_SECONDS):
            while len(await site.unbegun(request_ids)) > burst - HEAD_START_REQUESTS:
                await asyncio.sleep(0.02)
        may_join.touch()
        await site.wait_for_workers(2)
        waiting = await site.unbegun(request_ids)
        await asyncio.sleep(JOINED_SECONDS)
        owners = await site.owners(waiting)
    joined = sum(worker.startswith("joiner.") for worker in owners.values())
    return {
        "waiting_when_it_joined": len(waiting),
        "of_them_the_joiner_has": joined,
        "of_them_nobody_has": len(waiting) - len(owners),
        "joiners_share": joined / len(waiting) if waiting else 0.0,
    }


@asynccontextmanager
async def _site() -> AsyncIterator[Site]:
    with tempfile.TemporaryDirectory(prefix="ps-") as name:
        store = EmbeddedStore.at(Path(name), STORE_BYTES)
        await store.start()
        connections = connect(store.url)
        try:
            yield Site(Path(name), store.url, connections, RedisKeys(MODEL))
        finally:
            await connections.aclose()
            await store.stop()


@contextmanager
def _running(site: Site, workers: dict[str, list[str]]) -> Iterator[None]:
    """Run workers by name, with additional flags."""
    pace = ["--step-seconds", str(STEP_SECONDS), "--token-seconds", str(TOKEN_SECONDS)]
    common = ["--model", "/none", "--served-model-name", MODEL, "--redis-url", site.url, "--metrics-port", "0"]
    common += ["--max-num-seqs", str(SEATS), "--drain-seconds", "0"]
    with contextlib.ExitStack() as stack:
        log = stack.enter_context((site.directory / "log").open("wb"))
        for name, script in workers.items():
            command = [sys.executable, "-m", "bench.serving.scripted_worker", *pace, *script, *common]
            process = subprocess.Popen([*command, "--worker-id", name], stdout=log, stderr=log, env=os.environ)
            stack.callback(process.wait, 60)
            stack.callback(process.terminate)
        yield


def _parser() -> argparse.ArgumentParser:
    summary = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m bench claim-balance", description=summary)
    parser.add_argument("--workers", metavar="N", type=int, default=4)
    parser.add_argument(
        "--burst", metavar="N", type=int, help="requests at once (default: 128, or 300 with --late-joiner)"
    )
    parser.add_argument("--late-joiner", action="store_true", help="start one worker, and a second one after the burst")
    parser.add_argument("--json", metavar="PATH", type=Path, help="file for all figures")
    return parser
