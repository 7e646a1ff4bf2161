"""Measure bfloat16 all-reduces between GPUs of one host in CUDA graphs: NCCL, symmetric memory, and peer memory.

    python -m bench all-reduce --out DIR [--ranks N]

One process per GPU, connected as the ranks of a worker; NVLink multicast is off. Each implementation is checked against
the float32 sum, and bit by bit between ranks, before 64 of them in a graph are timed. Writes DIR/all_reduce_N.json.
"""

import argparse
import json
import multiprocessing
import statistics
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import FileStore  # type: ignore[attr-defined]

from engine_worker.model.paired_memory import peer_memory
from engine_worker.model.symmetric_memory import SymmetricMemory
from engine_worker.model.tensor_parallel import ProcessGroup, join_by

SIZES = tuple(2**exponent for exponent in (13, 14, 16, 18, 19, 20, 21, 22, 23, 25, 26))  # bytes
LARGEST_ONE_SHOT = 2**22  # every rank reads the data of all ranks
NUM_CALLS, NUM_REPLAYS = 64, 20
AllReduce = Callable[[Tensor], Tensor]  # returns the sum, possibly in place
Measure = Callable[[int, int, str, Path], None]  # rank, ranks, rendezvous folder, result folder


def implementations(ranks: ProcessGroup, num_bytes: int, device: torch.device) -> dict[str, AllReduce]:
    found: dict[str, AllReduce] = {"nccl": ranks.all_reduce}
    found["two_shots"] = SymmetricMemory(device, num_bytes, max_one_shot_bytes=0).all_reduce
    chosen = ProcessGroup(device)
    if not chosen.reduce_by(peer_memory(device, ranks.size)):
        raise RuntimeError("the peer memory all-reduce failed its self-test on a rank")
    found["served"] = chosen.all_reduce
    if num_bytes <= LARGEST_ONE_SHOT:
        found["one_shot"] = SymmetricMemory(device, num_bytes, max_one_shot_bytes=num_bytes).all_reduce
    return found


def check(all_reduce: AllReduce, ranks: ProcessGroup, tensor: Tensor) -> None:
    """Assert that the sum is right and has the same bits on all ranks."""
    parts = [torch.empty_like(tensor) for _ in range(ranks.size)]
    dist.all_gather(parts, tensor)
    found = all_reduce(tensor.clone()).clone()
    exact = torch.stack(parts).float().sum(0)
    # Each addition rounds once to 8 bits, at sums of at most four deviations per part.
    torch.testing.assert_close(found.float(), exact, rtol=0, atol=(ranks.size - 1) * ranks.size * 4 * 2**-8)
    first = ranks.broadcast(found.clone())
    assert torch.equal(first, found), "ranks have different bits"


def graph_microseconds(all_reduce: AllReduce, tensor: Tensor) -> float:
    for _ in range(3):
        all_reduce(tensor)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(torch.cuda.Stream()):
        graph.capture_begin(capture_error_mode="thread_local")
        for _ in range(NUM_CALLS):
            all_reduce(tensor)
        graph.capture_end()
    started, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    milliseconds = []
    for _ in range(NUM_REPLAYS):
        started.record()
        graph.replay()
        ended.record()
        ended.synchronize()
        milliseconds.append(started.elapsed_time(ended))
    return statistics.median(milliseconds) * 1e3 / NUM_CALLS


def measure(rank: int, size: int, directory: str, out: Path) -> None:
    device = torch.device("cuda", rank)
    ranks = join_by(FileStore(f"{directory}/ranks", size), rank, size, device)
    results: list[dict[str, Any]] = []
    for num_bytes in SIZES:
        generator = torch.Generator(device).manual_seed(rank)
        tensor = torch.randn(num_bytes // 2, dtype=torch.bfloat16, device=device, generator=generator)
        row: dict[str, Any] = {"bytes": num_bytes}
        for name, all_reduce in implementations(ranks, num_bytes, device).items():
            check(all_reduce, ranks, tensor)
            row[f"{name}_microseconds"] = graph_microseconds(all_reduce, torch.zeros_like(tensor))
        results.append(row)
        if rank == 0:
            print(", ".join(f"{key} {value:,.1f}" for key, value in row.items()), flush=True)
    if rank == 0:
        result = {"device": torch.cuda.get_device_name(), "ranks": size, "torch": torch.__version__, "sizes": results}
        out.mkdir(parents=True, exist_ok=True)
        (out / f"all_reduce_{size}.json").write_text(json.dumps(result, indent=1))
    ranks.close()


def main(argv: list[str]) -> int:
    return run_ranks(argv, __doc__, measure)


def run_ranks(argv: list[str], description: str | None, measure: Measure) -> int:
    """Run `measure` in one process per GPU and return the worst exit status."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", metavar="PATH", type=Path, required=True, help="folder for the result")
    parser.add_argument("--ranks", metavar="N", type=int, default=2, help="GPUs (default: %(default)s)")
    options = parser.parse_args(argv)
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as directory:
        start = partial(context.Process, target=measure)
        processes = [start(args=(rank, options.ranks, directory, options.out)) for rank in range(options.ranks)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
    return max(abs(process.exitcode or 0) for process in processes)
