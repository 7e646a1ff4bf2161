"""A group of ranks on one host: rank 0 sends the settings to the follower processes, and the ranks meet.

    rank 0       group = RankGroup.start(plan, report, followers)
    follower     ranks = meet(plan, rank, rendezvous_fd), then sum_by_peers(ranks, plan) on CUDA

They meet through a memfd that followers inherit, so no file is left over.
"""

import logging
from collections.abc import Callable

import torch
from torch.distributed import FileStore  # type: ignore[attr-defined]

from engine_worker.execution.group_health import GroupHealth
from engine_worker.execution.load.load_replica import LoadPlan, check_alike
from engine_worker.execution.load.start_times import Report
from engine_worker.execution.ranks.follower_processes import Followers
from engine_worker.execution.ranks.group_messages import GroupStart, encode
from engine_worker.model.spec import ModelSpec
from engine_worker.model.tensor_parallel import ProcessGroup, join_by

logger = logging.getLogger("worker")

# Block moves of a step, at most 11 bytes each. A slot takes memory only for pages that were written.
_MOVES_BYTES = 64 * 2**20


_NOTICE_SECONDS = 2.0  # until an end is noticed: some ms on an idle machine
PEERS, SERVING = "peers", "serve"  # phases: setup of peer memory, and a follower that has loaded


class RankGroup:
    def __init__(self, tensor_parallel: ProcessGroup, followers: Followers) -> None:
        self.tensor_parallel = tensor_parallel
        self.channel = followers.channel
        self._followers = followers

    @classmethod
    def start(cls, plan: LoadPlan, report: Report, followers: Followers | None = None) -> "RankGroup":
        """Send the settings to the followers, and wait until all have joined.

        Args:
            plan: The checked settings.
            report: Called with (phase, progress, detail).
            followers: Processes that were started before; None starts them now.

        Raises:
            ValueError: If the GPUs are not alike.
            RuntimeError: If a rank does not join.
        """
        size = plan.settings.tensor_parallel_size
        if plan.device.type == "cuda":
            check_alike([torch.cuda.get_device_name(rank) for rank in range(size)])
        report("load", 0.0, f"{size} ranks")
        followers = followers or Followers(size)
        followers.channel.make_slots(_slot_bytes(plan))
        followers.channel.send(encode(GroupStart(plan.settings, plan.drafts)))
        try:
            ranks = meet(plan, 0, followers.rendezvous_fd)
            if plan.device.type == "cuda":
                report("load", 0.0, PEERS)
                sum_by_peers(ranks, plan)
            return cls(ranks, followers)
        except RuntimeError:
            followers.wait_for_end(_NOTICE_SECONDS)
            raise

    @property
    def pids(self) -> list[int]:
        """Return the followers' process ids."""
        return self._followers.pids

    def phases(self) -> dict[int, list[tuple[str, float]]]:
        return {rank: self._followers.phases(rank) for rank in range(1, self.tensor_parallel.size)}

    def blame(self) -> None:
        """Wait for the report of a rank's end. Call when a collective has failed, which happens slightly earlier."""
        self._followers.wait_for_end(_NOTICE_SECONDS)

    def set_on_end(self, on_end: Callable[[str], None]) -> None:
        self._followers.on_end = lambda end: on_end(str(end))

    def dump_stacks(self) -> None:
        """Let every follower write its stacks to stderr."""
        self._followers.dump_stacks()

    def health(self) -> GroupHealth:
        """Return the current health. Thread-safe and cheap."""
        return GroupHealth(
            ranks_up=(True, *map(self._is_up, range(1, self.tensor_parallel.size))),
            messages_behind=(0, *self.channel.messages_behind()),
            channel_wait_seconds=self.channel.wait_seconds,
            step_skew_seconds=self.channel.skew_seconds(),
            all_reduce_path=self.tensor_parallel.all_reduce_path,
        )

    def _is_up(self, rank: int) -> bool:
        return self.channel.phase(rank) == SERVING and self._followers.lives(rank)

    def close(self) -> None:
        """End the followers, for programs that continue without a group."""
        self._followers.close()
        self.tensor_parallel.close()


def meet(plan: LoadPlan, rank: int, rendezvous_fd: int) -> ProcessGroup:
    """Wait for all ranks. torch's FileStore reopens the memfd for each operation, so it must stay open."""
    size = plan.settings.tensor_parallel_size
    return join_by(FileStore(f"/proc/self/fd/{rendezvous_fd}", size), rank, size, plan.device)


def sum_by_peers(ranks: ProcessGroup, plan: LoadPlan) -> None:
    """Use all-reduces through peer memory if they pass a test. A collective call of all ranks on CUDA."""
    from engine_worker.model.paired_memory import peer_memory  # noqa: PLC0415 - needs CUDA
    from engine_worker.model.peer_norm import peer_norm  # noqa: PLC0415

    shape = plan.blueprint.shape
    assert isinstance(shape, ModelSpec)  # the only class that ranks can share
    if not ranks.reduce_by(peer_memory(plan.device, ranks.size)):
        logger.warning("peer memory: not usable; NCCL runs the all-reduces")
    elif not ranks.norm_by(peer_norm(plan.device, ranks.size), shape.hidden_size):
        logger.warning("peer memory: fused all-reduce and norm not usable; they are separate launches")


def _slot_bytes(plan: LoadPlan) -> int:
    """Return the size of the largest step: every running slot with the longest table, and all tokens."""
    bounds = plan.settings.bounds
    table = -(-plan.max_model_len // plan.settings.block_size)
    numbers = bounds.max_num_samples * (table + 4) + 1 + bounds.max_num_batched_tokens
    return 4 * numbers + _MOVES_BYTES
