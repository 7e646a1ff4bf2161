"""Measure the CPU time per token of each process between the engine and the client.

    python -m bench delivery-cost --model DIR

The benchmark starts its own store, gateways and scripted worker (scripted_worker.py), with `--requests` concurrent
streams. CPU time is used because other load on the machine hardly changes it. A run with one token per stream shows the
cost of a request.
"""

import argparse
import asyncio
import json
from pathlib import Path
from typing import Any

from bench.provenance import provenance
from bench.serving.client_processes import run_load
from bench.serving.load_summary import summarize
from bench.serving.own_fleet import MODEL, FleetSize, OwnFleet, own_fleet
from bench.workload import PlannedRequest, Workload

PROMPT_TOKENS = 100


def main(argv: list[str]) -> int:
    options = _parser().parse_args(argv)
    rows = asyncio.run(_measure(options))
    for row in rows:
        print(_line(row))
    if options.json:
        options.json.write_text(json.dumps({**provenance(["delivery-cost", *argv]), "runs": rows}, indent=1) + "\n")
    return 1 if any(row["failed_requests"] for row in rows) else 0


async def _measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    steps = ["--step-seconds", str(options.step_seconds), "--max-num-seqs", str(options.requests)]
    async with own_fleet(options.model, steps, size=FleetSize(gateways=options.gateways)) as fleet:
        _run(options, fleet.url, 1, "warm-up")  # warm-up for what is loaded on first use
        return [_cost(options, fleet, tokens) for tokens in (1, options.output_tokens)]


def _cost(options: argparse.Namespace, fleet: OwnFleet, output_tokens: int) -> dict[str, Any]:
    before = fleet.cpu_seconds()
    summary = _run(options, fleet.url, output_tokens, f"{output_tokens} tokens")
    spent = {name: seconds - before[name] for name, seconds in fleet.cpu_seconds().items()}
    num_tokens = options.requests * output_tokens
    return {
        **summary,
        "tokens_a_request": output_tokens,
        "cpu_seconds": spent,
        "microseconds_per_token": {name: 1e6 * seconds / num_tokens for name, seconds in spent.items()},
    }


def _run(options: argparse.Namespace, url: str, output_tokens: int, stream: str) -> dict[str, Any]:
    workload = Workload(
        lengths=[(PROMPT_TOKENS, output_tokens)] * options.requests, token_ids=range(100, 49_000), seed=1
    )
    requests: list[PlannedRequest] = list(workload.requests(float("inf"), stream))
    return summarize({"rate": "inf"}, run_load(url, MODEL, requests, options.client_processes))


def _line(row: dict[str, Any]) -> str:
    each = "  ".join(f"{name} {cost:.1f}" for name, cost in row["microseconds_per_token"].items())
    return f"{row['requests']} x {row['tokens_a_request']} tokens, us of CPU per token: {each}"


def _parser() -> argparse.ArgumentParser:
    summary = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m bench delivery-cost", description=summary)
    parser.add_argument(
        "--model", metavar="PATH", type=Path, required=True, help="model directory; only its tokenizer is used"
    )
    parser.add_argument(
        "--requests", metavar="N", type=int, default=256, help="concurrent streams (default: %(default)s)"
    )
    parser.add_argument(
        "--output-tokens", metavar="N", type=int, default=100, help="tokens per stream (default: %(default)s)"
    )
    parser.add_argument(
        "--step-seconds",
        metavar="SECONDS",
        type=float,
        default=0.02,
        help="step duration of the scripted device (default: %(default)s)",
    )
    parser.add_argument("--gateways", metavar="N", type=int, default=1)
    parser.add_argument("--client-processes", metavar="N", type=int, default=1)
    parser.add_argument("--json", metavar="PATH", type=Path, help="file for all figures")
    return parser
