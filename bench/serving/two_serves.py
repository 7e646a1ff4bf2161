"""Measure how much CPU `pagestream serve` leaves to others: idle, and beside a second one on the same cores.

    python -m bench two-serves --out FILE [--tokens 128] [--idle-seconds 30] [-- SERVE FLAGS]

The result has the share of a core that all processes of an idle server use, and the tokens per second of one greedy
answer, alone and with two servers answering at once. Targets: 0.01 of a core, 0.4 of the speed alone.
"""

import argparse
import json
import os
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil

from bench.provenance import provenance
from bench.serving.own_server import OwnServer, own_server
from pagestream.demo_model import ensure_demo_model

MODEL = "two-serves"
_QUIET_SECONDS, _ANSWER_SECONDS = 5.0, 600.0  # the server has settled; an answer on a busy machine


def main(argv: list[str]) -> int:
    at = argv.index("--") if "--" in argv else len(argv)
    options, flags = _parser().parse_args(argv[:at]), argv[at + 1 :]
    model = options.model or ensure_demo_model(lambda phase, progress, detail: None)
    with own_server(model, MODEL, flags) as first:
        tokens_per_second(first, 8)  # the first answer pays for lazy initialization
        time.sleep(_QUIET_SECONDS)
        idle = cores_taken(first.pid, options.idle_seconds)
        alone = tokens_per_second(first, options.tokens)
        with own_server(model, MODEL, flags) as second, ThreadPoolExecutor(2) as pool:
            tokens_per_second(second, 8)
            both = list(pool.map(lambda server: tokens_per_second(server, options.tokens), (first, second)))
        alone_again = tokens_per_second(first, options.tokens)
    speed = (alone + alone_again) / 2
    result: dict[str, Any] = {
        **provenance(["two-serves", *argv]),
        "cpus": len(os.sched_getaffinity(0)),
        "idle_cores": round(idle, 4),
        "alone_tokens_per_second": [round(alone, 2), round(alone_again, 2)],
        "both_tokens_per_second": [round(one, 2) for one in both],
        "share_of_alone": [round(one / speed, 3) for one in both],
    }
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    return 0


def cores_taken(pid: int, seconds: float) -> float:
    """Return the CPU seconds per second of a process and all its descendants."""
    before, started = _cpu_seconds(pid), time.monotonic()
    time.sleep(seconds)
    return (_cpu_seconds(pid) - before) / (time.monotonic() - started)


def _cpu_seconds(pid: int) -> float:
    process = psutil.Process(pid)
    times = [one.cpu_times() for one in (process, *process.children(recursive=True))]
    return sum(one.user + one.system for one in times)


def tokens_per_second(server: OwnServer, tokens: int) -> float:
    """Return the speed of one greedy answer, including its short prompt."""
    body = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{server.url}/v1/completions", json.dumps(body).encode(), headers)
    started = time.monotonic()
    with urllib.request.urlopen(request, timeout=_ANSWER_SECONDS) as response:
        written: int = json.load(response)["usage"]["completion_tokens"]
    return written / (time.monotonic() - started)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench two-serves", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", metavar="PATH", type=Path, required=True)
    parser.add_argument(
        "--model", metavar="PATH", type=Path, default=None, help="model directory (default: the demo model)"
    )
    parser.add_argument("--tokens", metavar="N", type=int, default=128, help="tokens per answer (default: %(default)s)")
    parser.add_argument("--idle-seconds", metavar="SECONDS", type=float, default=30.0)
    return parser
