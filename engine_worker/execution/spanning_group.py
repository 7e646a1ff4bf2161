"""A group of ranks on several hosts: nobody starts the others, all meet at an address, and a cluster restarts them.

    rank 0       group = SpanningGroup.start(plan, report)     listens at --rendezvous-endpoint
    others       member = join_group(endpoint, rank, size)     engine_worker/remote_follower.py

They share no file: the settings come over the store of torch.distributed, steps over a channel of its own. A dead rank
is seen by its closed connections, with the next message; a hung one by the watchdog of steps on rank 0.

It is used at a start; afterwards the group is asked how its ranks are. It knows no step.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from engine_worker.execution.broadcast_channel import BroadcastReceiver, BroadcastSender
from engine_worker.execution.group_health import GroupHealth
from engine_worker.execution.group_messages import GroupStart, encode, start_of
from engine_worker.execution.load_replica import LoadPlan, load_plan, prepare_process
from engine_worker.execution.settings import ExecutionSettings, parse_endpoint
from engine_worker.execution.start_times import Report
from engine_worker.model.tensor_parallel import ProcessGroup, join_by

_MEETING = timedelta(minutes=10)  # until all hosts have pulled and begun
_IDLE = timedelta(days=365)  # between two messages
_START = "start"


class SpanningGroup:
    def __init__(self, tensor_parallel: ProcessGroup, channel: BroadcastSender) -> None:
        self.tensor_parallel = tensor_parallel
        self.channel = channel

    @classmethod
    def start(cls, plan: LoadPlan, report: Report) -> "SpanningGroup":
        """Wait until all others have joined."""
        settings = plan.settings
        report("load", 0.0, f"{settings.tensor_parallel_size} ranks, met at {settings.rendezvous_endpoint}")
        store = _store(settings.rendezvous_endpoint, settings.tensor_parallel_size, is_master=True)
        store.set(_START, encode(GroupStart(settings)).hex())
        ranks = join_by(store, 0, settings.tensor_parallel_size, plan.device, interface=None)
        return cls(ranks, BroadcastSender(_channel_group()))

    def phases(self) -> dict[int, list[tuple[str, float]]]:
        """None: they are in the logs of their hosts."""
        return {}

    def blame(self) -> None:
        """Nothing: the error of the collective is all that this host hears of another one's end."""

    def tell_end_to(self, hear: Callable[[str], None]) -> None:
        """It is told nobody: see blame()."""

    def dump_stacks(self) -> None:
        """Nothing: processes of other hosts hear no signal of this one, and write their own logs."""

    def health(self) -> GroupHealth:
        """All ranks that there are have loaded, for they load in step."""
        return GroupHealth(
            ranks_up=(True,) * self.tensor_parallel.size,
            channel_wait_seconds=self.channel.wait_seconds,
            all_reduce_path=self.tensor_parallel.all_reduce_path,
        )

    def close(self) -> None:
        """Leave; the others end by it."""
        self.channel.close()
        self.tensor_parallel.close()


@dataclass(frozen=True, kw_only=True)
class Member:
    """A rank that has joined, with what it is to load and whom it hears."""

    plan: LoadPlan
    tensor_parallel: ProcessGroup
    channel: BroadcastReceiver


def join_group(endpoint: str, rank: int, size: int, model: Path | None = None) -> Member:
    """Wait for rank 0 and the others. `model`: its directory on this host, if it is another than on that of rank 0.

    Raises ValueError with what does not fit.
    """
    store = _store(endpoint, size, is_master=False)
    told: ExecutionSettings = start_of(bytes.fromhex(store.get(_START).decode())).settings
    if told.tensor_parallel_size != size:
        raise ValueError(f"--tensor-parallel-size {size}: rank 0 was told {told.tensor_parallel_size}")
    plan = load_plan(replace(told, model=model or told.model), rank)
    prepare_process(plan.settings)
    ranks = join_by(store, rank, size, plan.device, interface=None)
    return Member(plan=plan, tensor_parallel=ranks, channel=BroadcastReceiver(_channel_group()))


def _store(endpoint: str, size: int, *, is_master: bool) -> TCPStore:
    host, port = parse_endpoint(endpoint)
    return TCPStore(host, port, size, is_master, _MEETING, wait_for_workers=False)


def _channel_group() -> dist.ProcessGroup:
    """Every rank of the default group makes it."""
    group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=_IDLE)
    return group
