"""Measure the share of the engine's speed that remains through HTTP, both in one run.

    e2e      all output tokens over the time from the first request sent to the last token
    decode   tokens after every stream has its first token, over the time from then on

Both sides get the same prompts at once, greedy and of fixed length: the engine in this process with a worker's default
scheduling, and streams of its own `pagestream serve`. Each repetition loads both again, because two processes with the
same settings differ, runs every concurrency, and swaps the order. The exit status is 1 if a request failed or the
median e2e share is below --min-share.
"""

import argparse
import asyncio
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import aiohttp

from bench.engine.side import run_engine
from bench.provenance import provenance
from bench.serving.own_server import ServerEnded, own_server
from bench.serving.streaming_request import RequestResult, Target, send
from bench.workload import PlannedRequest, Workload
from engine_worker.execution.load.load import load_model_runner
from engine_worker.execution.settings import MAX_NUM_BATCHED_TOKENS, MAX_NUM_SEQS, ExecutionSettings
from engine_worker.execution.step.model_runner import ModelRunner
from engine_worker.scheduling.scheduler_config import SchedulerConfig
from engine_worker.scheduling.settings import MAX_PREFILL_TOKENS_WITH_DECODES

NAME = "share"
Figures = dict[str, float]


def main(argv: list[str]) -> int:
    options = _parser().parse_args(argv)
    report = provenance(["http-share", *argv]) | {"runs": []}
    try:
        for rep in range(options.reps):
            report["runs"] += _repetition(options, rep)
    except ServerEnded as error:
        print(f"http_share: {error}", file=sys.stderr)
        return 1
    report["shares"] = shares(report["runs"])
    print(table(report["shares"]))
    options.output.mkdir(parents=True, exist_ok=True)
    path = options.output / f"http-share-{time.strftime('%Y%m%d-%H%M%S')}.json"
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {path}")
    return 0 if all(row["e2e_share"] >= options.min_share for row in report["shares"]) else 1


def _repetition(options: argparse.Namespace, rep: int) -> list[dict[str, Any]]:
    runner = _load(options)
    runs = []
    flags = ["--device", "cpu", "--kv-cache-memory-bytes", str(options.kv_cache_memory_bytes), *options.serve_flags]
    with own_server(options.model, NAME, flags) as server:
        sides = {
            "engine": lambda requests: _through_engine(runner, requests),
            "http": lambda requests: asyncio.run(_through_http(server.url, requests)),
        }
        for side in sides.values():  # the first call of a side pays for lazy initialization
            side(_requests(options, 1, f"warm-up {rep}", output_tokens=8))
        for concurrency in options.concurrency:
            requests = _requests(options, concurrency, f"{rep}/{concurrency}", options.output_tokens)
            for name in sorted(sides, reverse=rep % 2 == 1):
                runs.append({"rep": rep, "concurrency": concurrency, "side": name, **sides[name](requests)})
                print(json.dumps(runs[-1]), flush=True)
    return runs


def _requests(options: argparse.Namespace, count: int, stream: str, output_tokens: int) -> list[PlannedRequest]:
    lengths = [(options.prompt_tokens, output_tokens)] * count
    return list(Workload(lengths=lengths, token_ids=range(100, 49_000), seed=1).requests(float("inf"), stream))


def _load(options: argparse.Namespace) -> ModelRunner:
    length = options.prompt_tokens + options.output_tokens
    settings = ExecutionSettings(
        model=options.model,
        device="cpu",
        kv_cache_memory_bytes=options.kv_cache_memory_bytes,
        max_num_seqs=max(options.concurrency),
        max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS["cpu"],
        max_model_len=length,
    )
    runner = load_model_runner(settings, lambda phase, progress, detail: None)
    if (runner.num_blocks - 1) * runner.block_size < max(options.concurrency) * (length + runner.block_size):
        raise ServerEnded("--kv-cache-memory-bytes is too small for all streams, so the sides would not be comparable")
    return runner


def _through_engine(runner: ModelRunner, requests: list[PlannedRequest]) -> Figures:
    scheduling = SchedulerConfig(
        max_num_seqs=MAX_NUM_SEQS["cpu"],
        max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS["cpu"],
        max_prefill_tokens_with_decodes=MAX_PREFILL_TOKENS_WITH_DECODES["cpu"],
        max_model_len=runner.max_model_len,
    )
    prompts = [list(map(int, request.prompt)) for request in requests]
    run = run_engine(runner, prompts, requests[0].output_tokens, scheduling)
    return {
        "e2e_tokens_per_second": run.e2e_tokens_per_second,
        "decode_tokens_per_second": run.decode_tokens_per_second,
        "seconds_to_first_tokens": run.seconds_to_first_tokens,
    }


async def _through_http(url: str, requests: list[PlannedRequest]) -> Figures:
    timeout = aiohttp.ClientTimeout(total=None, sock_read=300)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        target = Target(session=session, url=url, model=NAME, chat=False)
        results = await asyncio.gather(*(send(target, request) for request in requests))
    if failures := {result.failure for result in results if result.failure}:
        raise ServerEnded(f"requests failed: {sorted(failures)}")
    return wave_figures(results)


def wave_figures(results: list[RequestResult]) -> Figures:
    """Return the figures of requests sent at once, with one event per token."""
    started = min(result.sent_at for result in results)
    all_began = max(result.event_times[0] for result in results)
    ended = max(result.event_times[-1] for result in results)
    # Excludes tokens of streams that started early and decoded during the other streams' prefill.
    decoded = sum(moment > all_began for result in results for moment in result.event_times)
    return {
        "e2e_tokens_per_second": sum(result.completion_tokens for result in results) / (ended - started),
        "decode_tokens_per_second": decoded / (ended - all_began),
        "seconds_to_first_tokens": all_began - started,
    }


def shares(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return per concurrency the medians of both sides, and the median of HTTP / engine per repetition."""
    rows = []
    for concurrency in dict.fromkeys(run["concurrency"] for run in runs):
        row: dict[str, Any] = {"concurrency": concurrency}
        for figure in ("e2e", "decode"):
            of_side = {
                side: {
                    run["rep"]: run[f"{figure}_tokens_per_second"]
                    for run in runs
                    if (run["concurrency"], run["side"]) == (concurrency, side)
                }
                for side in ("engine", "http")
            }
            each = [speed / of_side["engine"][rep] for rep, speed in of_side["http"].items()]
            row |= {f"{side}_{figure}": statistics.median(speeds.values()) for side, speeds in of_side.items()}
            row |= {f"{figure}_share": statistics.median(each), f"{figure}_share_each": each}
        rows.append(row)
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    lines = [f"{'C':>3}  {'engine e2e':>10} {'HTTP e2e':>9}  share (each)  |  decode: engine, HTTP, share (each)"]
    for row in rows:
        e2e, decode = (" ".join(f"{share:.2f}" for share in row[f"{name}_share_each"]) for name in ("e2e", "decode"))
        lines.append(
            f"{row['concurrency']:3}  {row['engine_e2e']:10.1f} {row['http_e2e']:9.1f}  {row['e2e_share']:.3f} ({e2e})"
            f"  |  {row['engine_decode']:.1f} {row['http_decode']:.1f} {row['decode_share']:.3f} ({decode})"
        )
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench http-share", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", metavar="PATH", type=Path, required=True, help="model directory")
    parser.add_argument(
        "--concurrency",
        metavar="N,N,...",
        type=_counts,
        default=[1, 4, 8, 16],
        help="concurrent streams, comma separated",
    )
    parser.add_argument("--prompt-tokens", metavar="N", type=int, default=192)
    parser.add_argument("--output-tokens", metavar="N", type=int, default=128)
    parser.add_argument("--reps", metavar="N", type=int, default=3)
    parser.add_argument("--min-share", metavar="RATIO", type=float, default=0.90)
    parser.add_argument(
        "--kv-cache-memory-bytes",
        metavar="BYTES",
        type=int,
        default=512 * 2**20,
        help="KV cache of each side (default: %(default)s)",
    )
    parser.add_argument(
        "--serve-flags",
        metavar="FLAGS",
        type=str.split,
        default=[],
        help="additional flags of `pagestream serve`, as one string",
    )
    parser.add_argument(
        "--output",
        metavar="PATH",
        type=Path,
        default=Path("bench/results"),
        help="folder of the JSON (default: %(default)s)",
    )
    return parser


def _counts(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]
