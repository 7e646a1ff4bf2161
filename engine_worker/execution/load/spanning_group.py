"""A group of ranks on several hosts. Each host starts its own rank; all meet at one address; the cluster restarts them.

    rank 0       group = SpanningGroup.start(plan, report)     listens at --rendezvous-endpoint
    others       member = join_group(endpoint, rank, size)     engine_worker/remote_follower.py

Settings are sent through torch.distributed's store, steps through a broadcast channel. A dead rank is noticed with the
next message by its closed connections, a hung one by the step watchdog of rank 0.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from engine_worker.execution.group_health import GroupHealth
from engine_worker.execution.load.load_replica import LoadPlan, load_plan, prepare_process
from engine_worker.execution.load.start_times import Report
from engine_worker.execution.ranks.broadcast_channel import BroadcastReceiver, BroadcastSender
from engine_worker.execution.ranks.group_messages import GroupStart, encode, start_of
from engine_worker.execution.settings import ExecutionSettings, parse_endpoint
from engine_worker.model.tensor_parallel import ProcessGroup, join_by

_MEETING = timedelta(minutes=10)  # until all hosts have pulled the image and started
_IDLE = timedelta(days=365)  # limit between two messages: an idle group must not time out
_START = "start"


class SpanningGroup:
    def __init__(self, tensor_parallel: ProcessGroup, channel: BroadcastSender) -> None:
        self.tensor_parallel = tensor_parallel
        self.channel = channel

    @classmethod
    def start(cls, plan: LoadPlan, report: Report) -> "SpanningGroup":
        """Wait until all other ranks have joined."""
        settings = plan.settings
        report("load", 0.0, f"{settings.tensor_parallel_size} ranks, meeting at {settings.rendezvous_endpoint}")
        store = _store(settings.rendezvous_endpoint, settings.tensor_parallel_size, is_master=True)
        store.set(_START, encode(GroupStart(settings, plan.drafts)).hex())
        ranks = join_by(store, 0, settings.tensor_parallel_size, plan.device, interface=None)
        return cls(ranks, BroadcastSender(_channel_group()))

    def phases(self) -> dict[int, list[tuple[str, float]]]:
        """Return nothing; the phases are in the logs of the other hosts."""
        return {}

    def blame(self) -> None:
        """Do nothing, because this host only gets the error of the collective."""

    def set_on_end(self, on_end: Callable[[str], None]) -> None:
        """Do nothing: see blame()."""

    def dump_stacks(self) -> None:
        """Do nothing, because signals do not reach other hosts."""

    def health(self) -> GroupHealth:
        """Return all ranks as up, because they load together and end together."""
        return GroupHealth(
            ranks_up=(True,) * self.tensor_parallel.size,
            channel_wait_seconds=self.channel.wait_seconds,
            all_reduce_path=self.tensor_parallel.all_reduce_path,
        )

    def close(self) -> None:
        """Leave the group. The other ranks end when they notice it."""
        self.channel.close()
        self.tensor_parallel.close()


@dataclass(frozen=True, kw_only=True)
class Member:
    """A rank that has joined: its group, its settings, and its channel."""

    plan: LoadPlan
    tensor_parallel: ProcessGroup
    channel: BroadcastReceiver


def join_group(endpoint: str, rank: int, size: int, model: Path | None = None) -> Member:
    """Wait for rank 0 and the other ranks.

    Args:
        endpoint: HOST:PORT of rank 0.
        rank: Rank of this process.
        size: Number of ranks.
        model: Model directory on this host, if it differs from rank 0's.

    Raises:
        ValueError: If the settings of this rank and of rank 0 do not fit together.
    """
    store = _store(endpoint, size, is_master=False)
    start = start_of(bytes.fromhex(store.get(_START).decode()))
    received: ExecutionSettings = start.settings
    if received.tensor_parallel_size != size:
        raise ValueError(f"--tensor-parallel-size {size}: rank 0 has {received.tensor_parallel_size}")
    drafts = start.drafts
    if model is not None and drafts.head is not None:  # the layer for MTP is beside the model's others
        drafts = replace(drafts, head=replace(drafts.head, directory=model))
    plan = load_plan(replace(received, model=model or received.model), rank, drafts)
    prepare_process(plan.settings)
    ranks = join_by(store, rank, size, plan.device, interface=None)
    return Member(plan=plan, tensor_parallel=ranks, channel=BroadcastReceiver(_channel_group()))


def _store(endpoint: str, size: int, *, is_master: bool) -> TCPStore:
    host, port = parse_endpoint(endpoint)
    return TCPStore(host, port, size, is_master, _MEETING, wait_for_workers=False)


def _channel_group() -> dist.ProcessGroup:
    """Create the channel's group. A collective call of all ranks."""
    group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=_IDLE)
    return group
