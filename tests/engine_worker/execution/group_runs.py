"""Long runs of a group as an engine drives it, for tests: what each rank has seen, and what the group says.

    run_watched(ranks, settings, requests)   a job of tests.engine_worker.model.ranks.Ranks: steps on both ranks, and of
                                             each rank a checksum of the hidden states of all of them
    tokens_of_runs(settings, runs)           a worker's runner with real followers, in a process of its own

On a CPU they run over gloo, on GPUs over NCCL and each other's memory, with the graphs that the settings ask for.
"""

import json
import multiprocessing
import warnings
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from engine_worker.execution.broadcast_channel import BroadcastReceiver, BroadcastSender
from engine_worker.execution.load import load_model_runner
from engine_worker.execution.load_replica import LoadPlan, load_plan, load_replica
from engine_worker.execution.model_runner import ModelRunner
from engine_worker.execution.replica import Replica
from engine_worker.execution.replica_group import ReplicaGroup, follow
from engine_worker.execution.sampler import Sampler
from engine_worker.execution.settings import ExecutionSettings
from engine_worker.model.implementation import NativeBlueprint
from engine_worker.model.linear import Head
from engine_worker.model.tensor_parallel import ProcessGroup
from shared.messages import GenerationRequest
from tests.builders import Transcript
from tests.engine_worker.execution.reference import make_engine

END = b"the run is over"  # no message of a group


@dataclass(frozen=True)
class Watched:
    """The account of one rank. `checksum` is of the rows that went into the head, of every step in order."""

    checksum: int
    num_steps: int
    pool: Tensor
    all_reduce_path: str
    takes_norms: bool
    tokens: dict[str, list[int]]  # empty on followers


class WatchedHead:
    """A head that keeps account of its inputs on the device, so that graphs do it too."""

    def __init__(self, head: Head) -> None:
        self._head = head
        self.account = torch.empty(0)

    def __call__(self, x: Tensor, logits: Tensor | None = None) -> Tensor:
        if not len(self.account):
            self.account = torch.zeros(2, dtype=torch.int64, device=x.device)  # the checksum, how often it was called
        add_to(self.account, x)
        return self._head(x, logits)


def add_to(account: Tensor, x: Tensor) -> None:
    """Every bit of `x`, and where it stands, changes account[0], a number modulo 2^64, for good."""
    bits = x.contiguous().view(torch.int16).flatten().to(torch.int64)
    places = torch.arange(1, len(bits) + 1, device=x.device)
    account[0].mul_(31).add_((bits * places).sum())
    account[1].add_(1)


class WatchedBlueprint(NativeBlueprint):
    head: WatchedHead

    def build(self, *args: Any, **options: Any) -> Any:
        network: Any = super().build(*args, **options)
        network._head = WatchedHead(network._head)
        object.__setattr__(self, "head", network._head)
        return network


class RunEnded(Exception):
    """To a follower, which is never told to return."""


class EndingReceiver(BroadcastReceiver):
    def receive(self) -> bytes:
        if (message := super().receive()) == END:
            raise RunEnded
        return message


def write_shape(directory: Path, **config: Any) -> Path:
    """A model without weights."""
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
    """`by_peers`: sums go through each other's memory, with the norms behind them; on GPUs. `config`: the engine's."""
    plan = load_plan(settings, ranks.rank)
    blueprint = WatchedBlueprint(plan.blueprint.shape)  # type: ignore[arg-type]
    plan = replace(plan, blueprint=blueprint)
    if by_peers:
        ranks = _by_peers(plan)
    replica = load_replica(plan, lambda phase, progress, detail: None, ranks).replica
    channel = dist.new_group(backend="gloo")
    with torch.inference_mode():
        replica.kv_cache.pool.zero_()  # what captures have written
        blueprint.head.account.zero_()
    if ranks.rank == 0:
        sender = BroadcastSender(channel)
        tokens = tokens_of(_runner(plan, replica, ranks, sender), requests, **config)
        sender.send(END)
    else:
        tokens = {}
        with suppress(RunEnded):
            follow(replica, ranks, EndingReceiver(channel), plan.device)
    checksum, num_steps = blueprint.head.account.tolist()
    takes_norms = ranks.peer_norm is not None
    return Watched(checksum, num_steps, replica.kv_cache.pool.cpu(), ranks.all_reduce_path, takes_norms, tokens)


def _runner(plan: LoadPlan, replica: Replica, ranks: ProcessGroup, sender: BroadcastSender) -> ModelRunner:
    shape = plan.blueprint.shape
    sampler = Sampler(shape.vocab_size, shape.eos_token_ids, plan.settings.bounds.max_num_seqs, plan.device, None)
    return ModelRunner(ReplicaGroup(replica, ranks, sender, lambda: None), sampler)


def _by_peers(plan: LoadPlan) -> ProcessGroup:
    """As rank_group.sum_by_peers() does it, and with less patience: it must work."""
    from engine_worker.model.paired_memory import peer_memory  # noqa: PLC0415 - of GPUs alone
    from engine_worker.model.peer_norm import peer_norm  # noqa: PLC0415

    ranks = ProcessGroup(plan.device)
    assert ranks.reduce_by(peer_memory(plan.device, ranks.size))
    assert ranks.norm_by(peer_norm(plan.device, ranks.size), plan.blueprint.shape.hidden_size)  # type: ignore[attr-defined]
    return ranks


def tokens_of(runner: ModelRunner, requests: list[GenerationRequest], **config: Any) -> dict[str, list[int]]:
    """However many steps it takes."""
    engine, transcript = make_engine(runner, **config), Transcript()
    for request in requests:
        engine.add_request(request)
    while engine.has_work:
        transcript.add(engine.step())
    engine.check_integrity()
    return transcript.tokens


@dataclass(frozen=True)
class Run:
    """Requests, and the engine's settings under which they run."""

    requests: list[GenerationRequest]
    config: dict[str, Any]


def tokens_of_runs(settings: ExecutionSettings, runs: Iterable[Run]) -> list[dict[str, list[int]]]:
    """In a process of its own: some settings must be made before CUDA starts. Its followers end with it."""
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
