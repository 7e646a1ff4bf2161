"""Measure rank 0's cost of sending a step to its group before its own devices start: no device, no model.

    encode      a step's description to a message: arrays, tables, MessagePack
    send        the message into the ring, and waking every follower, which are sleeping processes
    wake        only the kernel's part: waking as many processes by one eventfd each

Between two sends rank 0 describes steps for a millisecond, as an engine does. Rounds of sends and of wakes alternate.
Each figure is the median of a round, and the minimum over rounds, because other processes only add time. It has
wall-clock time and CPU time of rank 0's thread, whose core a woken process may take. A virtual machine wakes a process
on another core through its host, which may take longer than everything else.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from bench.provenance import provenance
from engine_worker.execution.ranks.group_messages import RunStep, encode
from engine_worker.execution.ranks.step_channel import RingSender
from engine_worker.execution.step.step_description import StepDescription
from engine_worker.kv.transfers import Transfers

BLOCK_SIZE, CONTEXT_TOKENS = 16, 1040  # tables are as wide as the longest sequence's; cases are named "x 1k"
ROUND_SENDS = 200
BETWEEN_SECONDS = 0.001
ROOT = Path(__file__).parents[2]
# Arguments of a follower: rank, size and inherited descriptors; of a sleeper: its descriptor.
FOLLOWER = """
import sys
from engine_worker.execution.ranks.step_channel import ChannelFds, RingReceiver
rank, size, *fds = map(int, sys.argv[1:])
receiver = RingReceiver(ChannelFds(*fds), rank, size)
while True:
    receiver.receive()
"""
SLEEPER = """
import os, sys
fd = int(sys.argv[1])
while True:
    os.eventfd_read(fd)
"""


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench step-channel", description=__doc__.split("\n")[0])
    parser.add_argument(
        "--ranks", metavar="N,N,...", type=_numbers, default=[2, 3], help="group sizes, comma separated"
    )
    parser.add_argument(
        "--sequences",
        metavar="N,N,...",
        type=_numbers,
        default=[1, 32, 256],
        help="sequences per step, comma separated",
    )
    parser.add_argument("--context-tokens", metavar="N", type=int, default=CONTEXT_TOKENS, help="tokens per sequence")
    parser.add_argument(
        "--groups", metavar="N", type=int, default=1, help="groups of layers, each with its block table"
    )
    parser.add_argument("--rounds", metavar="N", type=int, default=20)
    parser.add_argument("--output", metavar="PATH", type=Path, help="file to write the JSON to")
    options = parser.parse_args(argv)
    cases = []
    for size in options.ranks:
        for num_sequences in options.sequences:
            step = decode_of(num_sequences, options.context_tokens, options.groups)
            cases.append(case(size, step, options.rounds, ROUND_SENDS))
            print(", ".join(f"{name} {value}" for name, value in cases[-1].items()), file=sys.stderr, flush=True)
    result = {**provenance(["step-channel", *argv]), "cores": os.cpu_count(), "cases": cases}
    text = json.dumps(result, indent=1)
    if options.output:
        options.output.write_text(text + "\n", encoding="utf-8")
    print(text)
    return 0


def case(size: int, step: StepDescription, num_rounds: int, round_sends: int) -> dict[str, Any]:
    """Return the figures of a group of `size` ranks, in microseconds."""
    message = message_of(step)
    with followers(size, 2 * len(message)) as sender, sleepers(size - 1) as wake:
        parts = {"encode": lambda: message_of(step), "send": lambda: sender.send(message), "wake": wake}
        rounds = [{name: _median(part, step, round_sends) for name, part in parts.items()} for _ in range(num_rounds)]
    least = {
        f"{name}_microseconds": {
            clock: round(1e6 * min(each[name][clock] for each in rounds), 1) for clock in ("clock", "cpu")
        }
        for name in parts
    }
    sizes = {"message_bytes": len(message), "table_bytes": step.block_tables.nbytes}
    return {"ranks": size, "sequences": step.num_sequences, **sizes, **least}


def decode_of(num_sequences: int, context_tokens: int = CONTEXT_TOKENS, num_groups: int = 1) -> StepDescription:
    """Describe one token each for sequences of `context_tokens`."""
    rows = np.arange(num_sequences, dtype=np.int32)
    num_blocks = -(-context_tokens // BLOCK_SIZE)
    table = rows[:, None] * num_blocks + np.arange(num_blocks, dtype=np.int32)
    return StepDescription(
        query_start_loc=np.arange(num_sequences + 1, dtype=np.int32),
        seq_lens=np.full(num_sequences, context_tokens, dtype=np.int32),
        feedback=rows,
        token_ids=np.zeros(num_sequences, dtype=np.int32),
        logits_indices=rows,
        block_tables=np.stack([table] * num_groups),
        state_blocks=np.zeros(0, dtype=np.int32),
        drafted_states=np.zeros((3, 0), dtype=np.int32),
        max_query_len=1,
        max_seq_len=context_tokens,
        transfers=Transfers(),
    )


def message_of(step: StepDescription) -> bytes:
    return encode(RunStep(step.to_bytes(), (step.num_sequences, False), [], step.num_logits))


@contextmanager
def followers(size: int, slot_bytes: int) -> Iterator[RingSender]:
    """Yield rank 0's end of a ring that all other ranks read."""
    sender = RingSender(size)
    sender.make_slots(slot_bytes)
    with ExitStack() as processes:
        for rank in range(1, size):
            fds = sender.fds(rank)
            processes.enter_context(_process(FOLLOWER, [rank, size, *fds], fds))
        yield sender
    sender.close()


@contextmanager
def sleepers(count: int) -> Iterator[Callable[[], None]]:
    """Yield a function that wakes `count` sleeping processes."""
    fds = [os.eventfd(0, os.EFD_SEMAPHORE | os.EFD_CLOEXEC) for _ in range(count)]

    def wake() -> None:
        for fd in fds:
            os.eventfd_write(fd, 1)

    with ExitStack() as processes:
        for fd in fds:
            processes.enter_context(_process(SLEEPER, [fd], [fd]))
        yield wake
    for fd in fds:
        os.close(fd)


@contextmanager
def _process(program: str, arguments: Sequence[int], fds: Sequence[int]) -> Iterator[None]:
    command = [sys.executable, "-c", program, *map(str, arguments)]
    with subprocess.Popen(command, pass_fds=fds, env={**os.environ, "PYTHONPATH": str(ROOT)}) as process:
        try:
            yield
        finally:
            process.kill()


def _median(action: Callable[[], object], step: StepDescription, times: int) -> dict[str, float]:
    """Return the median wall-clock and CPU seconds of this thread; a woken process may take its core."""
    by_clock, by_cpu = [], []
    for _ in range(times):
        until = time.perf_counter() + BETWEEN_SECONDS
        while time.perf_counter() < until:
            message_of(step)
        began_cpu = time.thread_time()
        began = time.perf_counter()
        action()
        by_clock.append(time.perf_counter() - began)
        by_cpu.append(time.thread_time() - began_cpu)
    return {"clock": statistics.median(by_clock), "cpu": statistics.median(by_cpu)}


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]
