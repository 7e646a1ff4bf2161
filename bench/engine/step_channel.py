"""The cost to rank 0 of telling a group of a step, before its own devices begin: python -m bench step-channel.

No device and no model.

    encode      a step's description to a message: arrays, tables, MessagePack
    send        the message into the ring, and every follower woken: processes of their own, which sleep until then
    wake        the kernel's part of that, alone: as many processes woken by an eventfd each, and nothing sent

Between two sends rank 0 describes steps for a millisecond, as an engine is busy then. Rounds of sends and of bare
wakes are taken in turn. Each figure is the median of a round, of the least of all rounds: others on the machine only
add. By the clock, and in CPU time of rank 0's thread, whose core a woken process may take. A virtual machine wakes a
process on another core through its host, which may take longer than all the rest.
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
from engine_worker.execution.group_messages import RunStep, encode
from engine_worker.execution.step_channel import RingSender
from engine_worker.execution.step_description import StepDescription
from engine_worker.scheduling.batch import Transfers

BLOCK_SIZE, CONTEXT_TOKENS = 16, 1040  # tables are as wide as the longest sequence's: the cases are named "x 1k"
SLOT_BYTES = 1 << 20
ROUND_SENDS = 200
BETWEEN_SECONDS = 0.001
ROOT = Path(__file__).parents[2]
# Of a follower: its rank, the size, and the descriptors that it inherits. Of what is merely woken: its own one.
FOLLOWER = """
import sys
from engine_worker.execution.step_channel import ChannelFds, RingReceiver
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
    parser.add_argument("--ranks", type=_numbers, default=[2, 3], help="sizes of groups, comma separated")
    parser.add_argument("--sequences", type=_numbers, default=[1, 32, 256], help="of a step, comma separated")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--output", type=Path, help="write the JSON here too")
    options = parser.parse_args(argv)
    cases = []
    for size in options.ranks:
        for num_sequences in options.sequences:
            cases.append(case(size, num_sequences, options.rounds, ROUND_SENDS))
            print(", ".join(f"{name} {value}" for name, value in cases[-1].items()), file=sys.stderr, flush=True)
    result = {**provenance(["step-channel", *argv]), "cores": os.cpu_count(), "cases": cases}
    text = json.dumps(result, indent=1)
    if options.output:
        options.output.write_text(text + "\n", encoding="utf-8")
    print(text)
    return 0


def case(size: int, num_sequences: int, num_rounds: int, round_sends: int) -> dict[str, Any]:
    """The figures of a group of `size` ranks, in microseconds."""
    step = decode_of(num_sequences)
    message = message_of(step)
    with followers(size) as sender, sleepers(size - 1) as wake:
        parts = {"encode": lambda: message_of(step), "send": lambda: sender.send(message), "wake": wake}
        rounds = [{name: _median(part, step, round_sends) for name, part in parts.items()} for _ in range(num_rounds)]
    least = {
        f"{name}_microseconds": {
            clock: round(1e6 * min(each[name][clock] for each in rounds), 1) for clock in ("clock", "cpu")
        }
        for name in parts
    }
    return {"ranks": size, "sequences": num_sequences, "message_bytes": len(message), **least}


def decode_of(num_sequences: int) -> StepDescription:
    """One token each of sequences of a thousand, with tables of whichever blocks."""
    rows = np.arange(num_sequences, dtype=np.int32)
    num_blocks = CONTEXT_TOKENS // BLOCK_SIZE
    return StepDescription(
        query_start_loc=np.arange(num_sequences + 1, dtype=np.int32),
        seq_lens=np.full(num_sequences, CONTEXT_TOKENS, dtype=np.int32),
        feedback=rows,
        token_ids=np.zeros(num_sequences, dtype=np.int32),
        logits_indices=rows,
        block_tables=rows[:, None] * num_blocks + np.arange(num_blocks, dtype=np.int32),
        max_query_len=1,
        max_seq_len=CONTEXT_TOKENS,
        transfers=Transfers(),
    )


def message_of(step: StepDescription) -> bytes:
    return encode(RunStep(step.to_bytes(), (step.num_sequences, False), [], step.num_logits))


@contextmanager
def followers(size: int) -> Iterator[RingSender]:
    """Rank 0's end of a ring that all others read, message after message."""
    sender = RingSender(size)
    sender.make_slots(SLOT_BYTES)
    with ExitStack() as processes:
        for rank in range(1, size):
            fds = sender.fds(rank)
            processes.enter_context(_process(FOLLOWER, [rank, size, *fds], fds))
        yield sender
    sender.close()


@contextmanager
def sleepers(count: int) -> Iterator[Callable[[], None]]:
    """Processes of which none does anything but sleep; calling the value wakes all of them."""
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
    """Seconds of the clock, in which a woken process may have taken this one's core, and of this thread's CPU time."""
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
