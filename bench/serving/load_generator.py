"""Load an OpenAI-compatible server with streamed requests and time every token.

    python -m bench [OPTIONS]

Prompts are seeded random token ids (completions) or words (chat). A run is bounded by concurrency or has Poisson
arrivals; comma-separated values make several runs. The exit status is 1 if a request failed, was cut short, or had
another number of tokens than requested.
"""

import argparse
import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import aiohttp

from bench.provenance import provenance
from bench.serving import load_report
from bench.serving.load_summary import samples, summarize
from bench.serving.streaming_request import RequestResult, Target, send
from bench.workload import PlannedRequest, Workload, WorkloadError, read_trace, take_lengths

_Value = TypeVar("_Value")


def main(argv: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else argv
    options = _parser().parse_args(arguments)
    if options.png and not load_report.can_draw():
        return 2
    try:
        return asyncio.run(_benchmark(options, provenance(arguments)))
    except (WorkloadError, aiohttp.ClientError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2


async def _benchmark(options: argparse.Namespace, origin: dict[str, Any]) -> int:
    workload = _workload(options)
    runs: list[tuple[dict[str, Any], dict[str, list[float]]]] = []
    async with _target(options) as target:
        origin |= {"model": target.model, "server": await _server_version(target)}
        if options.warmup:
            warmup = replace(workload, lengths=take_lengths([(32, 8)], options.warmup))
            await _run(target, warmup, options.warmup, float("inf"), stream="warm-up")
        loads: list[tuple[str, float]] = [("rate", rate) for rate in options.rate or []]
        loads = loads or [("concurrency", limit) for limit in options.concurrency]
        for kind, value in loads:
            limit, rate = (0, value) if kind == "rate" else (int(value), float("inf"))
            results = await _run(target, workload, limit, rate, stream=f"{kind} {value}")
            runs.append((summarize({kind: value}, results), samples(results)))
            print(f"{kind} {value}: {len(results)} requests done", file=sys.stderr)
    return _report(options, origin, runs)


def _report(options: argparse.Namespace, origin: dict[str, Any], runs: list[tuple[dict[str, Any], Any]]) -> int:
    summaries = [summary for summary, _ in runs]
    print(load_report.table(summaries))
    if options.json:
        load_report.write_json(options.json, origin, summaries)
    if options.png:
        load_report.write_png(options.png, origin, runs)
    failures = [failure for summary in summaries for failure in summary["failures"]]
    for failure in failures:
        print(f"failed: {failure}", file=sys.stderr)
    return 1 if failures else 0


async def _run(target: Target, workload: Workload, limit: int, rate: float, stream: str) -> list[RequestResult]:
    """Run all requests: at most `limit` at once, or if it is 0, each at its arrival time."""
    planned = workload.requests(rate, stream)
    if limit:
        lanes = await asyncio.gather(*(_lane(target, planned) for _ in range(limit)))
        return [result for lane in lanes for result in lane]
    requests = list(planned)
    start = asyncio.get_running_loop().time()
    return list(await asyncio.gather(*(_at_its_time(target, request, start) for request in requests)))


async def _lane(target: Target, planned: Iterator[PlannedRequest]) -> list[RequestResult]:
    return [await send(target, request) for request in planned]


async def _at_its_time(target: Target, request: PlannedRequest, start: float) -> RequestResult:
    await asyncio.sleep(start + request.arrival_seconds - asyncio.get_running_loop().time())
    return await send(target, request)


@asynccontextmanager
async def _target(options: argparse.Namespace) -> AsyncIterator[Target]:
    url = options.url.rstrip("/").removesuffix("/v1")
    headers = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=None, sock_read=options.timeout_seconds),
        headers=headers,
        read_bufsize=2**20,
    ) as session:
        yield Target(
            session=session,
            url=url,
            model=options.model or await _first_model(session, url),
            chat=options.api == "chat",
            exact_lengths=not options.stop_at_eos,
            extra_body=options.extra_body,
        )


async def _first_model(session: aiohttp.ClientSession, url: str) -> str:
    async with session.get(f"{url}/v1/models", raise_for_status=True) as response:
        models = await response.json()
    try:
        return str(models["data"][0]["id"])
    except (KeyError, IndexError, TypeError) as error:
        raise WorkloadError(f"{url}/v1/models lists no model: {str(models)[:200]}") from error


async def _server_version(target: Target) -> Any:
    async with target.session.get(f"{target.url}/version") as response:
        return await response.json() if response.status == 200 else "unknown"


def _workload(options: argparse.Namespace) -> Workload:
    lengths = read_trace(options.trace) if options.trace else [(options.prompt_tokens, options.output_tokens)]
    first, last = options.token_ids
    return Workload(
        lengths=take_lengths(lengths, options.num_requests or max(len(lengths), 64)),
        token_ids=range(first, last),
        seed=options.seed,
        chat=options.api == "chat",
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="pagestream bench", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--url", metavar="URL", default="http://127.0.0.1:8000", help="server (default: %(default)s)")
    parser.add_argument("--model", metavar="NAME", default="", help="model name (default: the first one in /v1/models)")
    parser.add_argument("--api", choices=("completions", "chat"), default="completions")
    parser.add_argument("--api-key", metavar="KEY", default="")
    parser.add_argument("--trace", metavar="PATH", type=Path, help="JSON list of [prompt_tokens, output_tokens]")
    parser.add_argument(
        "--prompt-tokens",
        metavar="N",
        type=_count,
        default=192,
        help="prompt tokens without a trace (default: %(default)s)",
    )
    parser.add_argument(
        "--output-tokens",
        metavar="N",
        type=_count,
        default=128,
        help="output tokens without a trace (default: %(default)s)",
    )
    parser.add_argument(
        "--num-requests", metavar="N", type=_count, help="requests per run (default: the whole trace, or 64)"
    )
    parser.add_argument(
        "--concurrency",
        metavar="N,N,...",
        type=_list_of(_count),
        default=[8],
        help="concurrent requests, e.g. 1,4,16 (default: 8)",
    )
    parser.add_argument(
        "--rate", metavar="N,N,...", type=_list_of(_rate), help="Poisson arrivals per second instead; inf: all at once"
    )
    _add_request_options(parser)
    return parser


def _add_request_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of each request and of the output files."""
    parser.add_argument("--seed", metavar="N", type=int, default=1)
    parser.add_argument(
        "--warmup",
        metavar="N",
        type=int,
        default=4,
        help="warm-up requests before the first run (default: %(default)s)",
    )
    parser.add_argument(
        "--token-ids",
        metavar="N:N",
        type=_token_ids,
        default=(100, 49000),
        help="range of prompt token ids (default: 100:49000)",
    )
    parser.add_argument("--stop-at-eos", action="store_true", help="let outputs end early, and accept any length")
    parser.add_argument(
        "--extra-body", metavar="JSON", type=json.loads, default={}, help="JSON object merged into each request"
    )
    parser.add_argument(
        "--timeout-seconds",
        metavar="SECONDS",
        type=float,
        default=300.0,
        help="silence that fails a request (default: %(default)s)",
    )
    parser.add_argument("--json", metavar="PATH", type=Path, help="file for all figures")
    parser.add_argument("--png", metavar="PATH", type=Path, help="file for a picture of the distributions")


def _count(text: str) -> int:
    if (value := int(text)) < 1:
        raise ValueError("at least 1")
    return value


def _rate(text: str) -> float:
    if not (value := float(text)) > 0:
        raise ValueError("over 0")
    return value


def _list_of(parse: Callable[[str], _Value]) -> Callable[[str], list[_Value]]:
    return lambda text: [parse(part) for part in text.split(",")]


def _token_ids(text: str) -> tuple[int, int]:
    first, _, last = text.partition(":")
    if not 0 <= int(first) < int(last):
        raise ValueError("FIRST:LAST")
    return int(first), int(last)
