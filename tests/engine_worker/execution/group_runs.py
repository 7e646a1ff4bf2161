"""Long engine runs on a group of two ranks, for tests.

    run_watched(ranks, settings, requests)   a job of tests.engine_worker.model.ranks.Ranks that returns, for each rank,
                                             a checksum of its hidden states
    tokens_of_runs(settings, runs)           a runner with real followers, in a separate process

CPU ranks use gloo. GPU ranks use NCCL and peer memory, with the graphs that the settings select.
"""

import json
import multiprocessing
import warnings
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from engine_worker.execution.load.load import load_model_runner
from engine_worker.execution.load.load_replica import LoadPlan, load_plan, load_replica
from engine_worker.execution.ranks.broadcast_channel import BroadcastReceiver, BroadcastSender
from engine_worker.execution.ranks.replica_group import Follower, ReplicaGroup
from engine_worker.execution.sampling.sampler import Sampler
from engine_worker.execution.settings import ExecutionSettings
from engine_worker.execution.step.model_runner import ModelRunner
from engine_worker.execution.step.replica import Replica
from engine_worker.model.implementation import NativeBlueprint
from engine_worker.model.linear import Head
from engine_worker.model.tensor_parallel import ProcessGroup
from shared.messages import GenerationRequest
from tests.builders import Transcript
from tests.engine_worker.execution.reference import make_engine

Result = TypeVar("Result")
END = b"the run is over"  # not a valid message of a group


@dataclass(frozen=True)
class Watched:
    """The result of one rank. `checksum` covers the rows passed to the head in every step, in order."""

    checksum: int
    num_steps: int
    pool: Tensor
    all_reduce_path: str
    takes_norms: bool
    tokens: dict[str, list[int]]  # empty on followers


class WatchedHead:
    """A head that updates a checksum of its inputs on the device, so that graphs include it."""

    def __init__(self, head: Head) -> None:
        self._head = head
        self.account = torch.empty(0)

    def __call__(self, x: Tensor, logits: Tensor | None = None) -> Tensor:
        if not len(self.account):
            self.account = torch.zeros(2, dtype=torch.int64, device=x.device)  # [checksum, number of calls]
        add_to(self.account, x)
        return self._head(x, logits)


def add_to(account: Tensor, x: Tensor) -> None:
    """Update account[0], a checksum modulo 2^64, with every bit of `x` and its position; count the call."""
    bits = x.contiguous().view(torch.int16).flatten().to(torch.int64)
    places = torch.arange(1, len(bits) + 1, device=x.device)
    account[0].mul_(31).add_((bits * places).sum())
    account[1].add_(1)


class WatchedBlueprint(NativeBlueprint):
    head: WatchedHead

    def build(self, *args: Any, **options: Any) -> Any:
        network: Any = super().build(*args, **options)
        network.head = WatchedHead(network.head)
        object.__setattr__(self, "head", network.head)
        return network


class RunEnded(Exception):
    """Ends the loop of a follower, which otherwise never returns."""


class EndingReceiver(BroadcastReceiver):
    def receive(self) -> bytes:
        if (message := super().receive()) == END:
            raise RunEnded
        return message


def write_shape(directory: Path, **config: Any) -> Path:
    """Write a model directory that has a config and no weights."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def run_watched(
    ranks: ProcessGroup,
    settings: ExecutionSettings,
    by_peers: bool,
    requests: list[GenerationRequest],
    config: dict[str, Any],
) -> Watched:
    """Run `requests` on both ranks and return this rank's result.

    Args:
        ranks: The group of this rank.
        settings: The engine's settings.
        by_peers: Whether all-reduces and norms use peer memory (GPUs only).
        requests: The requests to run.
        config: The scheduler's settings.
    """
    plan = load_plan(settings, ranks.rank)
    blueprint = WatchedBlueprint(plan.blueprint.shape)  # type: ignore[arg-type]
    plan = replace(plan, blueprint=blueprint)
    if by_peers:
        ranks = _by_peers(plan)
    replica = load_replica(plan, lambda phase, progress, detail: None, ranks).replica
    channel = dist.new_group(backend="gloo")
    with torch.inference_mode():
        replica.kv_cache.pool.zero_()  # clears what graph captures have written
        blueprint.head.account.zero_()
    if ranks.rank == 0:
        sender = BroadcastSender(channel)
        tokens = tokens_of(_runner(plan, replica, ranks, sender), requests, **config)
        sender.send(END)
    else:
        tokens = {}
        with suppress(RunEnded):
            Follower(replica, ranks, plan.device).follow(EndingReceiver(channel))
    checksum, num_steps = blueprint.head.account.tolist()
    takes_norms = ranks.peer_norm is not None
    return Watched(checksum, num_steps, replica.kv_cache.pool.cpu(), ranks.all_reduce_path, takes_norms, tokens)


def _runner(plan: LoadPlan, replica: Replica, ranks: ProcessGroup, sender: BroadcastSender) -> ModelRunner:
    shape = plan.blueprint.shape
    sampler = Sampler(shape.vocab_size, shape.eos_token_ids, plan.settings.bounds.max_num_seqs, plan.device, None)
    return ModelRunner(ReplicaGroup(replica, ranks, sender, lambda: None), sampler)


def _by_peers(plan: LoadPlan) -> ProcessGroup:
    """Do what rank_group.sum_by_peers() does, and fail if peer memory is not available."""
    from engine_worker.model.paired_memory import peer_memory  # noqa: PLC0415 - only for GPUs
    from engine_worker.model.peer_norm import peer_norm  # noqa: PLC0415

    ranks = ProcessGroup(plan.device)
    assert ranks.reduce_by(peer_memory(plan.device, ranks.size))
    assert ranks.norm_by(peer_norm(plan.device, ranks.size), plan.blueprint.shape.hidden_size)  # type: ignore[attr-defined]
    return ranks


def tokens_of(runner: ModelRunner, requests: list[GenerationRequest], **config: Any) -> dict[str, list[int]]:
    """Run all requests to their end and return their tokens by request id."""
    engine, transcript = make_engine(runner, **config), Transcript()
    for request in requests:
        engine.add_request(request)
    while engine.has_work:
        transcript.add(engine.step())
    engine.check_integrity()
    return transcript.tokens


@dataclass(frozen=True)
class Run:
    """Requests and the scheduler settings to run them with."""

    requests: list[GenerationRequest]
    config: dict[str, Any]


def in_own_process(function: Callable[..., Result], *arguments: Any) -> Result:
    """Run a function that starts a group, in a process that is killed afterwards.

    A group cannot be left while there are CUDA graphs with collectives of NCCL. Followers end with the process.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send_result, args=(sender, function, arguments))
    process.start()
    sender.close()
    try:
        found: Result = receiver.recv()
    finally:
        process.kill()
        process.join()
    return found


def _send_result(sender: Connection, function: Callable[..., object], arguments: tuple[Any, ...]) -> None:
    sender.send(function(*arguments))


def tokens_of_runs(settings: ExecutionSettings, runs: Iterable[Run]) -> list[dict[str, list[int]]]:
    """Run in a separate process, because some settings must precede CUDA's start. Followers end with it."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        return process.submit(_tokens_of_runs, settings, list(runs)).result()


def _tokens_of_runs(settings: ExecutionSettings, runs: list[Run]) -> list[dict[str, list[int]]]:
    warnings.simplefilter("error")
    runner = load_model_runner(settings, lambda phase, progress, detail: None)
    try:
        return [tokens_of(runner, run.requests, **run.config) for run in runs]
    finally:
        if runner.group is not None:
            runner.group.close()
