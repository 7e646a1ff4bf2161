"""Measure sums over GPUs followed by a norm, in CUDA graphs: fused in one launch, and separate.

    python -m bench sum-norm --out DIR [--ranks N]

Both use the worker's code (peer_norm.py, paired_memory.py). With two ranks the results are compared bit by bit before
64 of either in a graph are timed. Writes DIR/sum_norm_N.json.
"""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import FileStore  # type: ignore[attr-defined]

from bench.kernel.all_reduce import graph_microseconds, run_ranks
from engine_worker.model.paired_memory import peer_memory
from engine_worker.model.peer_norm import peer_norm
from engine_worker.model.tensor_parallel import ProcessGroup, join_by
from kernels.rms_norm import add_rms_norm

NUMBERS_OF_ROWS = (1, 8, 16, 32, 64, 128, 192, 256)
EPS = 1e-5


def measure_hidden(ranks: ProcessGroup, hidden: int, device: torch.device) -> list[dict[str, Any]]:
    if not ranks.norm_by(peer_norm(device, ranks.size), hidden) or ranks.peer_norm is None:
        raise RuntimeError("the fused sum and norm failed its self-test on a rank")
    peers, weight = ranks.peer_norm, torch.linspace(0.5, 1.5, hidden, device=device).to(torch.bfloat16)

    def at_once(part: Tensor) -> Tensor:
        return peers.add_rms_norm(part, part, weight, EPS)[0]

    def in_turn(part: Tensor) -> Tensor:
        return add_rms_norm(ranks.all_reduce(part), part, weight, EPS)[0]

    results = []
    for num_rows in NUMBERS_OF_ROWS:
        generator = torch.Generator(device).manual_seed(ranks.rank)
        part = torch.randn(num_rows, hidden, dtype=torch.bfloat16, device=device, generator=generator)
        if not peers.serves(part):
            continue
        residual = torch.ones_like(part)
        found = peers.add_rms_norm(part, residual, weight, EPS)
        expected = add_rms_norm(ranks.all_reduce(part.clone()), residual, weight, EPS)
        if ranks.size == 2:
            assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, expected, strict=True))
        zeros = torch.zeros_like(part)  # zeros stay zeros, however often they are summed in place
        times = {f"{way.__name__}_microseconds": graph_microseconds(way, zeros) for way in (at_once, in_turn)}
        results.append({"hidden": hidden, "rows": num_rows, **times})
        if ranks.rank == 0:
            print(", ".join(f"{key} {value:,.1f}" for key, value in results[-1].items()), flush=True)
    return results


def measure(rank: int, size: int, directory: str, out: Path) -> None:
    device = torch.device("cuda", rank)
    ranks = join_by(FileStore(f"{directory}/ranks", size), rank, size, device)
    if not ranks.reduce_by(peer_memory(device, size)):
        raise RuntimeError("the peer memory all-reduce failed its self-test on a rank")
    results = [row for hidden in (4096, 8192) for row in measure_hidden(ranks, hidden, device)]
    if rank == 0:
        result = {"device": torch.cuda.get_device_name(), "ranks": size, "torch": torch.__version__, "cases": results}
        out.mkdir(parents=True, exist_ok=True)
        (out / f"sum_norm_{size}.json").write_text(json.dumps(result, indent=1))
    ranks.close()


def main(argv: list[str]) -> int:
    return run_ranks(argv, __doc__, measure)
