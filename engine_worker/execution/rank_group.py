"""A group of ranks of one host as processes: rank 0 tells the others what to load, and they find each other.

    rank 0       group = RankGroup.start(plan, report, followers)
    follower     ranks = meet(plan, rank, rendezvous_fd), then sum_by_peers(ranks, plan) on CUDA

They meet by a memfd that followers inherit, so there is no file to be left over. It is used at a worker's start;
afterwards the group is asked how its ranks are. It knows no step.
"""

import logging
from collections.abc import Callable

import torch
from torch.distributed import FileStore  # type: ignore[attr-defined]

from engine_worker.execution.follower_processes import Followers
from engine_worker.execution.group_health import GroupHealth
from engine_worker.execution.group_messages import GroupStart, encode
from engine_worker.execution.load_replica import LoadPlan, check_alike
from engine_worker.execution.start_times import Report
from engine_worker.model.spec import ModelSpec
from engine_worker.model.tensor_parallel import ProcessGroup, join_by

logger = logging.getLogger("worker")

# Beside a step's arrays: block moves, 11 bytes each at most. A slot takes memory only as far as it was written.
_MOVES_BYTES = 64 * 2**20


_SEEN_SECONDS = 2.0  # some ms, but on a machine that is busy
PEERS, SERVING = "peers", "serve"  # phases: of trying sums by peers, and of a follower that has loaded


class RankGroup:
    def __init__(self, tensor_parallel: ProcessGroup, followers: Followers) -> None:
        self.tensor_parallel = tensor_parallel
        self.channel = followers.channel
        self._followers = followers

    @classmethod
    def start(cls, plan: LoadPlan, report: Report, followers: Followers | None = None) -> "RankGroup":
        """Tell the followers what to load, and wait until all have joined. `followers`: those that were started."""
        size = plan.settings.tensor_parallel_size
        if plan.device.type == "cuda":
            check_alike([torch.cuda.get_device_name(rank) for rank in range(size)])
        report("load", 0.0, f"{size} ranks")
        followers = followers or Followers(size)
        followers.channel.make_slots(_slot_bytes(plan))
        followers.channel.send(encode(GroupStart(plan.settings)))
        try:
            ranks = meet(plan, 0, followers.rendezvous_fd)
            if plan.device.type == "cuda":
                report("load", 0.0, PEERS)
                sum_by_peers(ranks, plan)
            return cls(ranks, followers)
        except RuntimeError:
            followers.wait_for_end(_SEEN_SECONDS)
            raise

    @property
    def pids(self) -> list[int]:
        """The followers' process ids."""
        return self._followers.pids

    def phases(self) -> dict[int, list[tuple[str, float]]]:
        return {rank: self._followers.phases(rank) for rank in range(1, self.tensor_parallel.size)}

    def blame(self) -> None:
        """To be called where a collective failed: a rank's end breaks it a moment before that end is seen and told."""
        self._followers.wait_for_end(_SEEN_SECONDS)

    def tell_end_to(self, hear: Callable[[str], None]) -> None:
        self._followers.on_end = lambda end: hear(str(end))

    def dump_stacks(self) -> None:
        """Have every follower write its stacks to stderr."""
        self._followers.dump_stacks()

    def health(self) -> GroupHealth:
        """From any thread; costs nothing."""
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
        """End the followers. For programs that go on without their group."""
        self._followers.close()
        self.tensor_parallel.close()


def meet(plan: LoadPlan, rank: int, rendezvous_fd: int) -> ProcessGroup:
    """Wait for all ranks. The store of torch.distributed opens the memfd anew each time, so it must stay open."""
    size = plan.settings.tensor_parallel_size
    return join_by(FileStore(f"/proc/self/fd/{rendezvous_fd}", size), rank, size, plan.device)


def sum_by_peers(ranks: ProcessGroup, plan: LoadPlan) -> None:
    """Try sums through each other's memory, which all ranks of GPUs do together, and take what is right."""
    from engine_worker.model.paired_memory import peer_memory  # noqa: PLC0415 - of GPUs alone
    from engine_worker.model.peer_norm import peer_norm  # noqa: PLC0415

    shape = plan.blueprint.shape
    assert isinstance(shape, ModelSpec)  # no other is shared by ranks
    if not ranks.reduce_by(peer_memory(plan.device, ranks.size)):
        logger.warning("all-reduces are NCCL's")
    elif not ranks.norm_by(peer_norm(plan.device, ranks.size), shape.hidden_size):
        logger.warning("sums over ranks and the norms behind them are launches of their own")


def _slot_bytes(plan: LoadPlan) -> int:
    """The most that a step can take: every seat with a table as long as can be, and all tokens."""
    bounds = plan.settings.bounds
    table = -(-plan.max_model_len // plan.settings.block_size)
    numbers = bounds.max_num_seqs * (table + 4) + 1 + bounds.max_num_batched_tokens
    return 4 * numbers + _MOVES_BYTES
