"""Run servers in turn under the same loads.

    python -m bench http-cases --trace FILE --server NAME READY_URL COMMAND ...

Each command must start an OpenAI-compatible API of model `m` at READY_URL's address. A server has the whole machine
until it is stopped with all its processes. Prompts, arrivals and client processes are the same. Writes OUT/NAME.jsonl
and OUT/NAME.log during the run, and prints a table of all servers.
"""

import argparse
import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from bench.provenance import provenance
from bench.serving.client_processes import run_load
from bench.serving.load_summary import summarize
from bench.workload import PlannedRequest, Workload, read_trace, take_lengths

MODEL = "m"
STOP_SECONDS = 30.0
POLL_SECONDS = 0.25
WARM_UP = [(32, 32)] * 64


class Server(NamedTuple):
    name: str
    ready_url: str
    command: str

    @property
    def url(self) -> str:
        parts = urlsplit(self.ready_url)
        return f"{parts.scheme}://{parts.netloc}"


class NotReady(RuntimeError):
    """The server ended, or did not answer in time."""


def main(argv: list[str]) -> int:
    options = _parser().parse_args(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    origin = provenance(["http-cases", *argv])
    rows: list[dict[str, Any]] = []
    failed = False
    for server in (Server(*words) for words in options.server):
        with (options.out / f"{server.name}.jsonl").open("a", encoding="utf-8") as file:
            try:
                for row in _measure(server, options):
                    rows.append(row)
                    print(json.dumps({**row, **origin}), file=file, flush=True)
                    print(line(row), flush=True)
            except NotReady as error:
                print(f"{server.name}: {error}", file=sys.stderr, flush=True)
                failed = True
    print(table(rows))
    return 1 if failed or any(row["failed_requests"] for row in rows) else 0


def _measure(server: Server, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    with _running(server, options) as start_seconds:
        run_load(server.url, MODEL, _requests(options, WARM_UP, float("inf"), "warm-up"), options.processes)
        for rep in range(options.repeats):
            for rate, count in options.load:
                lengths = take_lengths(read_trace(options.trace), count)
                requests = _requests(options, lengths, rate, f"rate {rate} {rep}")
                results = run_load(server.url, MODEL, requests, options.processes)
                summary = summarize({"rate": str(rate)}, results)
                yield {"server": server.name, "rep": rep, "start_seconds": start_seconds, **summary}


def _requests(
    options: argparse.Namespace, lengths: list[tuple[int, int]], rate: float, stream: str
) -> list[PlannedRequest]:
    workload = Workload(lengths=lengths, token_ids=range(100, 49_000), seed=options.seed)
    return list(workload.requests(rate, stream))


@contextmanager
def _running(server: Server, options: argparse.Namespace) -> Iterator[float]:
    """Run a server and yield the seconds from its start to its first answer; all its processes are gone afterwards."""
    started_at = time.monotonic()
    with (options.out / f"{server.name}.log").open("ab") as log:
        process = subprocess.Popen(
            shlex.split(server.command), stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        while not _is_ready(server.ready_url):
            if process.poll() is not None:
                raise NotReady(f"ended with status {process.returncode}; see {server.name}.log")
            if time.monotonic() - started_at > options.start_seconds:
                raise NotReady(f"did not answer {server.ready_url} in {options.start_seconds:.0f} s")
            time.sleep(POLL_SECONDS)
        yield time.monotonic() - started_at
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_SECONDS)
        _end_group(process)


def _end_group(process: "subprocess.Popen[bytes]") -> None:
    """Kill a process group and wait until its processes are gone, so that the next server finds the memory free."""
    until = time.monotonic() + STOP_SECONDS
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        while time.monotonic() < until:
            os.killpg(process.pid, 0)
            time.sleep(0.02)


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


COLUMNS = ("server", "load", "req/s", "tok/s", "TTFT p50/p99 ms", "ITL p50/p99 ms", "TPOT p50/p99 ms", "events/token")


def cells(row: dict[str, Any]) -> list[str]:
    head = [row["server"], f"{row['load']['rate']} x {row['requests']}"]
    if "duration_seconds" not in row:
        return [*head, f"all failed: {row['failures']}"]
    latencies = (row[f"{name}_seconds"] for name in ("time_to_first_token", "inter_token", "time_per_output_token"))
    return [
        *head,
        f"{row['requests_per_second']:.2f}",
        f"{row['output_tokens_per_second']:.0f}",
        *(f"{1e3 * values['p50']:.1f} / {1e3 * values['p99']:.1f}" for values in latencies),
        f"{row['events_per_token']:.3f}",
    ]


def line(row: dict[str, Any]) -> str:
    failed = f"  {row['failed_requests']} FAILED: {row['failures']}" if row["failed_requests"] else ""
    return "  ".join(cells(row)) + failed


def table(rows: list[dict[str, Any]]) -> str:
    """Return a table sorted by load, so that servers are comparable."""
    lines = [list(COLUMNS), *(cells(row) for row in sorted(rows, key=lambda row: str(row["load"]["rate"])))]
    lines = [[*one, *[""] * (len(COLUMNS) - len(one))] for one in lines]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(one, widths, strict=True)) for one in lines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench http-cases", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--server", nargs=3, action="append", required=True, metavar=("NAME", "READY_URL", "COMMAND"))
    parser.add_argument(
        "--trace", metavar="PATH", type=Path, required=True, help="JSON list of [prompt_tokens, output_tokens]"
    )
    parser.add_argument(
        "--load", metavar="RATE:N,...", type=_loads, default=_loads("inf:1000,30:1000,10:500"), help="RATE:REQUESTS,..."
    )
    parser.add_argument("--repeats", metavar="N", type=int, default=1)
    parser.add_argument("--processes", metavar="N", type=int, default=6, help="client processes (default: %(default)s)")
    parser.add_argument("--seed", metavar="N", type=int, default=1)
    parser.add_argument(
        "--start-seconds",
        metavar="SECONDS",
        type=float,
        default=150.0,
        help="start timeout; a slower server is skipped (default: %(default)s)",
    )
    parser.add_argument(
        "--out",
        metavar="PATH",
        type=Path,
        default=Path("bench/results"),
        help="folder of NAME.jsonl and NAME.log (default: %(default)s)",
    )
    return parser


def _loads(text: str) -> list[tuple[float, int]]:
    pairs = (part.partition(":") for part in text.split(","))
    return [(float(rate), int(count)) for rate, _, count in pairs]
