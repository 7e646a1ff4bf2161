"""python -m bench delivery-cost --model DIR: what a token costs each process between the engine and the client.

Store, gateways and a scripted worker (bench/scripted_worker.py) of this benchmark's own; `--requests` streams at once.
Told in CPU time, which other programs on the machine change little, per token that reached the client. A run of one
token a stream shows what a request costs by itself.
"""

import argparse
import asyncio
import contextlib
import json
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from bench.client_processes import run_load
from bench.load_report import provenance
from bench.statistics import summarise
from bench.workload import PlannedRequest, Workload
from pagestream.embedded_store import EmbeddedStore

MODEL = "m"
START_SECONDS = 60.0
PROMPT_TOKENS = 100
STORE_BYTES = 2**30

Processes = dict[str, psutil.Process]


def main(argv: list[str]) -> int:
    options = _parser().parse_args(argv)
    rows = asyncio.run(_measure(options))
    for row in rows:
        print(_line(row))
    if options.json:
        options.json.write_text(json.dumps({**provenance(["delivery-cost", *argv]), "runs": rows}, indent=1) + "\n")
    return 1 if any(row["failed_requests"] for row in rows) else 0


async def _measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    port = _free_port()
    with tempfile.TemporaryDirectory(prefix="ps-") as directory:
        store = EmbeddedStore.at(Path(directory), STORE_BYTES)
        await store.start()
        assert store.process is not None, "the directory is new, so the store is ours"
        try:
            with _started(options, store.url, port, Path(directory)) as processes:
                processes["store"] = psutil.Process(store.process.process.pid)
                url = f"http://127.0.0.1:{port}"
                _run(options, url, 1, "warm-up")  # loads what is loaded on first use
                return [_cost(options, url, processes, tokens) for tokens in (1, options.output_tokens)]
        finally:
            await store.stop()


def _cost(options: argparse.Namespace, url: str, processes: Processes, output_tokens: int) -> dict[str, Any]:
    before = {name: _cpu_seconds(process) for name, process in processes.items()}
    summary = _run(options, url, output_tokens, f"{output_tokens} tokens")
    spent = {name: _cpu_seconds(process) - before[name] for name, process in processes.items()}
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
    return summarise({"rate": "inf"}, run_load(url, MODEL, requests, options.client_processes))


def _cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


@contextmanager
def _started(options: argparse.Namespace, store_url: str, port: int, directory: Path) -> Iterator[Processes]:
    common = ["--model", str(options.model), "--served-model-name", MODEL, "--redis-url", store_url]
    listen = ["--port", str(port), *(["--reuse-port"] if options.gateways > 1 else [])]
    commands = {f"gateway {number}": ["gateway", *common, *listen] for number in range(options.gateways)}
    steps = ["--step-seconds", str(options.step_seconds), "--max-num-seqs", str(options.requests)]
    commands["worker"] = ["bench.scripted_worker", *common, *steps, "--metrics-port", "0"]
    with (directory / "log").open("wb") as log:
        running = {
            name: subprocess.Popen([sys.executable, "-m", *command], stdout=log, stderr=subprocess.STDOUT)
            for name, command in commands.items()
        }
        try:
            _wait_until_ready(port, directory / "log")
            yield {name: psutil.Process(process.pid) for name, process in running.items()}
        finally:
            for process in running.values():
                process.terminate()
            for process in running.values():
                process.wait(60)


def _wait_until_ready(port: int, log: Path) -> None:
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=5) as reply:
            if reply.status == 200:
                return
        time.sleep(0.1)
    raise RuntimeError("nobody is ready:\n" + log.read_text(errors="replace")[-2000:])


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def _line(row: dict[str, Any]) -> str:
    each = "  ".join(f"{name} {cost:.1f}" for name, cost in row["microseconds_per_token"].items())
    return f"{row['requests']} x {row['tokens_a_request']} tokens, us of CPU a token: {each}"


def _parser() -> argparse.ArgumentParser:
    summary = (__doc__ or "").partition(": ")[2]
    parser = argparse.ArgumentParser(prog="python -m bench delivery-cost", description=summary)
    parser.add_argument("--model", type=Path, required=True, help="model directory, for its tokenizer")
    parser.add_argument("--requests", type=int, default=256, help="streams at once (%(default)s)")
    parser.add_argument("--output-tokens", type=int, default=100, help="of each stream (%(default)s)")
    parser.add_argument("--step-seconds", type=float, default=0.02, help="of the scripted device (%(default)s)")
    parser.add_argument("--gateways", type=int, default=1)
    parser.add_argument("--client-processes", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write every figure here")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
