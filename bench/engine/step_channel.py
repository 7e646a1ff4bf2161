"""The step channel of a group at rank 0: what a step's message costs the process that decides.

    python -m bench step-channel [--rows 1 32 256] [--prompt-tokens 1024] [--messages 2000] [--out FILE]

Each message is a decode of so many sequences, sent to a real follower that waits for it and decodes it; the next one is
sent when it has been read. Median and 90th percentile of `send` alone, and with the message's encoding. Aim: 15 us.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from bench.provenance import provenance
from engine_worker.execution.group_messages import RunStep, encode, work_of
from engine_worker.execution.step_channel import ChannelFds, RingReceiver, RingSender
from engine_worker.execution.step_description import StepDescription
from engine_worker.scheduling.batch import Transfers

BLOCK_SIZE = 16
SLOT_BYTES = 2**22
LAST = b""  # the message that ends a follower
WARM_UP = 100


def main(argv: list[str]) -> int:
    options = _parser().parse_args(argv)
    results = []
    for rows in options.rows:
        found = measure(rows, options.prompt_tokens, options.messages)
        print(
            f"{rows:4} sequences, {found['bytes']:6} bytes: send p50 {found['send_us']['p50']:.1f} us, p90 "
            f"{found['send_us']['p90']:.1f}; with encoding p50 {found['all_us']['p50']:.1f}, p90 "
            f"{found['all_us']['p90']:.1f}",
            flush=True,
        )
        results.append(found)
    if options.out:
        report = {**provenance(["step-channel", *argv]), "results": results}
        options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


def measure(rows: int, num_tokens: int, num_messages: int) -> dict[str, Any]:
    sender = RingSender(2)
    sender.make_slots(SLOT_BYTES)
    fds = sender.fds(1)
    argv = [sys.executable, "-m", "bench.engine.step_channel", *map(str, fds)]
    step = RunStep(description(rows, num_tokens).to_bytes(), (rows, False), [], rows)
    send_us, all_us = [], []
    with subprocess.Popen(argv, pass_fds=fds):
        for _ in range(WARM_UP + num_messages):
            began = time.perf_counter()
            message = encode(step)
            encoded = time.perf_counter()
            sender.send(message)
            sent = time.perf_counter()
            send_us.append(1e6 * (sent - encoded))
            all_us.append(1e6 * (sent - began))
            while sender.messages_behind()[0]:
                time.sleep(0)  # another process may need this one's core to read it
        sender.send(LAST)
    sender.close()
    return {
        "sequences": rows,
        "bytes": len(message),
        "send_us": _percentiles(send_us[WARM_UP:]),
        "all_us": _percentiles(all_us[WARM_UP:]),
    }


def description(rows: int, num_tokens: int) -> StepDescription:
    """A decode of `rows` sequences of `num_tokens` tokens each."""
    one_each = np.arange(rows, dtype=np.int32)
    tables = np.ones((rows, num_tokens // BLOCK_SIZE + 1), np.int32)
    starts = np.arange(rows + 1, dtype=np.int32)
    return StepDescription(starts, one_each, one_each, one_each, one_each, tables, 1, num_tokens, Transfers())


def follow(fds: ChannelFds) -> None:
    receiver = RingReceiver(fds, 1, 2)
    while (message := receiver.receive()) != LAST:
        work_of(message)


def _percentiles(microseconds: list[float]) -> dict[str, float]:
    deciles = statistics.quantiles(microseconds, n=10)
    return {"p50": round(statistics.median(microseconds), 2), "p90": round(deciles[-1], 2)}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench step-channel", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--prompt-tokens", type=int, default=1024)
    parser.add_argument("--messages", type=int, default=2000)
    parser.add_argument("--out", type=Path)
    return parser


if __name__ == "__main__":
    follow(ChannelFds(*map(int, sys.argv[1:])))
