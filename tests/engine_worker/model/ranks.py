"""Processes that are ranks of a group over gloo or NCCL, started once and given jobs in turn.

    with Ranks(4) as ranks:
        ranks.run(2, job, *arguments)      job(tensor_parallel, *arguments) in each of two ranks; their results

Jobs are module-level functions. All ranks are one torch.distributed group; smaller groups are its first ranks.
"""

import multiprocessing
import tempfile
import traceback
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]

from engine_worker.model.tensor_parallel import SINGLE, ProcessGroup, join_by

SECONDS = 250  # limit per job; the first waits for the ranks to start, up to 100 s on a busy machine


class Ranks(AbstractContextManager["Ranks"]):
    def __init__(self, size: int, device_type: str = "cpu") -> None:
        context = multiprocessing.get_context("spawn")
        self._directory = tempfile.TemporaryDirectory()
        self._num_jobs = 0
        pipes = [context.Pipe() for _ in range(size)]
        self._connections = [ours for ours, _ in pipes]
        self._processes = [
            context.Process(target=_serve, args=(rank, size, device_type, self._directory.name, theirs), daemon=True)
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for process in self._processes:
            process.start()

    def run(self, size: int, job: Callable[..., Any], *arguments: Any) -> list[Any]:
        self._num_jobs += 1
        for connection in self._connections[:size]:
            connection.send((self._num_jobs, size, job, arguments))
        return [self._answer(connection) for connection in self._connections[:size]]

    def _answer(self, connection: Connection) -> Any:
        number = 0
        while number < self._num_jobs:  # skips results of jobs that a test gave up
            assert connection.poll(SECONDS), "a rank does not answer"
            number, result, error = connection.recv()
        assert error is None, error
        return result

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for connection in self._connections:
            connection.close()
        self._directory.cleanup()


def _serve(rank: int, size: int, device_type: str, directory: str, connection: Connection) -> None:
    warnings.simplefilter("error")  # as in the test process
    torch.set_num_threads(1)
    device = torch.device("cpu") if device_type == "cpu" else torch.device(device_type, rank)
    groups = _groups(rank, size, device, Path(directory))
    while True:
        number, members, job, arguments = connection.recv()
        try:
            with torch.inference_mode():
                connection.send((number, job(groups.get(members, SINGLE), *arguments), None))
        except Exception:
            connection.send((number, None, f"rank {rank} of {members}: {traceback.format_exc()}"))


def _groups(rank: int, size: int, device: torch.device, directory: Path) -> dict[int, ProcessGroup]:
    """Return the groups by number of ranks; every rank takes part in creating each group."""
    groups = {size: join_by(FileStore(str(directory / "ranks"), size), rank, size, device)}
    for members in range(2, size):
        group = dist.new_group(list(range(members)))
        if rank < members:
            groups[members] = ProcessGroup(device, group)
    return groups
