"""Measure how much a batch of 2,000 lines delays the first tokens of chats.

    python -m bench batch-beside-chat --model DIR

The benchmark starts its own store, gateway and worker. The same chat load with the same arrivals runs alone and beside
a batch of /v1/batches, several times in turn. The scripted worker's steps take 6 ms and 25 us per token, about those of
an 8B model on an H200; --real runs the model. The exit status is 1 if p95 is more than --max-increase above that
without a batch, if a line does not have exactly one result, or if a chat failed.
"""

import argparse
import asyncio
import json
import random
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp

from bench.provenance import provenance
from bench.serving.load_report import tell
from bench.serving.own_fleet import MODEL, OwnFleet, own_fleet
from bench.serving.streaming_request import RequestResult, Target, send
from bench.statistics import distribution, quantile
from bench.workload import PlannedRequest, Workload

STEP_SECONDS, TOKEN_SECONDS = 0.006, 25e-6
TOKEN_IDS = range(100, 49_000)


def main(argv: list[str]) -> int:
    options = _parser().parse_args(argv)
    result = {**provenance(["batch-beside-chat", *argv]), **asyncio.run(_measure(options))}
    tell(result, options.json)
    return 0 if result["p95_ratio"] <= 1 + options.max_increase and not result["problems"] else 1


async def _measure(options: argparse.Namespace) -> dict[str, Any]:
    times: dict[str, list[float]] = {"alone": [], "beside": []}
    rounds: list[dict[str, Any]] = []
    problems: list[str] = []
    with tempfile.TemporaryDirectory(prefix="ps-files-") as files:
        async with _fleet(options, files) as fleet, _target(fleet) as target:
            await _chats(target, options, 8, "warm-up")
            for number in range(options.rounds):
                stream = f"round {number}"
                alone = await _chats(_salted(target, f"{number} alone"), options, options.chats, stream)
                batch_id = await _begin_batch(target, options, seed=number)
                beside = await _chats(_salted(target, f"{number} beside"), options, options.chats, stream)
                during = await _batch(target, batch_id)
                problems += await _end_batch(target, batch_id, options.lines)
                problems += [result.failure for result in (*alone, *beside) if result.failure]
                counts = during["request_counts"]
                figures = {"lines_answered_beside_the_chats": counts["completed"], "of": counts["total"]}
                for name, results in (("alone", alone), ("beside", beside)):
                    seconds = [one.time_to_first_token_seconds for one in results if not one.failure]
                    times[name] += seconds
                    figures[f"{name}_p95_seconds"] = quantile(sorted(seconds), 0.95)
                rounds.append(figures)
                print(f"{stream}: {figures}", file=sys.stderr)
    p95 = {name: quantile(sorted(seconds), 0.95) for name, seconds in times.items()}
    return {
        "worker": "real" if options.real else {"step_seconds": STEP_SECONDS, "token_seconds": TOKEN_SECONDS},
        "first_token_seconds": {name: {**distribution(seconds), "p95": p95[name]} for name, seconds in times.items()},
        "p95_ratio": p95["beside"] / p95["alone"],
        "rounds": rounds,
        "problems": sorted(set(problems)),
    }


@asynccontextmanager
async def _fleet(options: argparse.Namespace, files: str) -> AsyncIterator[OwnFleet]:
    script = ["--step-seconds", str(STEP_SECONDS), "--token-seconds", str(TOKEN_SECONDS)]
    async with own_fleet(
        options.model,
        options.worker_flags.split() if options.real else [*script, *options.worker_flags.split()],
        gateway_flags=["--files-dir", files, *options.gateway_flags.split()],
        worker="engine_worker" if options.real else "bench.serving.scripted_worker",
    ) as fleet:
        yield fleet


@asynccontextmanager
async def _target(fleet: OwnFleet) -> AsyncIterator[Target]:
    timeout = aiohttp.ClientTimeout(total=None, sock_read=300)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        yield Target(session=session, url=fleet.url, model=MODEL, chat=False)


def _salted(target: Target, salt: str) -> Target:
    """Add a salt to the target's prompts, so that none is found in the prefix cache."""
    return replace(target, extra_body={"cache_salt": salt})


async def _chats(target: Target, options: argparse.Namespace, count: int, stream: str) -> list[RequestResult]:
    """Send each chat at its time, whatever happened to earlier ones."""
    lengths = [(options.prompt_tokens, options.output_tokens)] * count
    planned = Workload(lengths=lengths, token_ids=TOKEN_IDS, seed=1).requests(options.rate, stream)
    begin = asyncio.get_running_loop().time() + 0.5

    async def at_its_time(request: PlannedRequest) -> RequestResult:
        await asyncio.sleep(begin + request.arrival_seconds - asyncio.get_running_loop().time())
        return await send(target, request)

    return list(await asyncio.gather(*map(at_its_time, planned)))


async def _begin_batch(target: Target, options: argparse.Namespace, seed: int) -> str:
    """Start a batch and return when some of its lines are finished."""
    form = aiohttp.FormData()
    form.add_field("purpose", "batch")
    form.add_field("file", _lines(options, seed).encode(), filename="in.jsonl")
    async with target.session.post(f"{target.url}/v1/files", data=form, raise_for_status=True) as reply:
        file_id = (await reply.json())["id"]
    body = {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "24h"}
    async with target.session.post(f"{target.url}/v1/batches", json=body, raise_for_status=True) as reply:
        batch_id = str((await reply.json())["id"])
    while (await _batch(target, batch_id))["request_counts"]["completed"] == 0:
        await asyncio.sleep(0.05)
    return batch_id


def _lines(options: argparse.Namespace, seed: int) -> str:
    source, lines = random.Random(seed), []
    for number in range(options.lines):
        prompt = source.choices(TOKEN_IDS, k=options.line_prompt_tokens)
        body = {"model": MODEL, "prompt": prompt, "max_tokens": options.line_output_tokens, "ignore_eos": True}
        lines.append({"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body})
    return "\n".join(map(json.dumps, lines))


async def _batch(target: Target, batch_id: str) -> dict[str, Any]:
    async with target.session.get(f"{target.url}/v1/batches/{batch_id}", raise_for_status=True) as reply:
        found: dict[str, Any] = await reply.json()
        return found


async def _end_batch(target: Target, batch_id: str, num_lines: int) -> list[str]:
    """Wait for the end of the batch, and return the errors in its results."""
    while (batch := await _batch(target, batch_id))["status"] not in ("failed", "completed", "cancelled"):
        await asyncio.sleep(0.1)
    if batch["output_file_id"] is None:
        return [f"the batch is {batch['status']} without results"]
    url = f"{target.url}/v1/files/{batch['output_file_id']}/content"
    async with target.session.get(url, raise_for_status=True) as reply:
        counts = Counter(json.loads(line)["custom_id"] for line in (await reply.text()).splitlines())
    if counts != Counter(map(str, range(num_lines))):
        return [f"{len(counts)} of {num_lines} lines have a result; a line has at most {max(counts.values())}"]
    return []


def _parser() -> argparse.ArgumentParser:
    summary = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m bench batch-beside-chat", description=summary)
    parser.add_argument(
        "--model",
        metavar="PATH",
        type=Path,
        required=True,
        help="model directory; only its tokenizer is used without --real",
    )
    parser.add_argument("--real", action="store_true", help="run the model instead of the scripted worker")
    parser.add_argument(
        "--rate", metavar="N", type=float, default=4.0, help="chats per second, Poisson arrivals (default: %(default)s)"
    )
    parser.add_argument("--chats", metavar="N", type=int, default=120, help="chats per round (default: %(default)s)")
    parser.add_argument(
        "--prompt-tokens", metavar="N", type=int, default=512, help="prompt tokens per chat (default: %(default)s)"
    )
    parser.add_argument(
        "--output-tokens", metavar="N", type=int, default=64, help="output tokens per chat (default: %(default)s)"
    )
    parser.add_argument("--lines", metavar="N", type=int, default=2000)
    parser.add_argument("--line-prompt-tokens", metavar="N", type=int, default=256)
    parser.add_argument("--line-output-tokens", metavar="N", type=int, default=64)
    parser.add_argument("--rounds", metavar="N", type=int, default=2)
    parser.add_argument(
        "--max-increase",
        metavar="RATIO",
        type=float,
        default=0.15,
        help="allowed increase of p95, as a ratio (default: %(default)s)",
    )
    parser.add_argument("--worker-flags", metavar="NAME", default="")
    parser.add_argument("--gateway-flags", metavar="NAME", default="")
    parser.add_argument("--json", metavar="PATH", type=Path, help="file for all figures")
    return parser
