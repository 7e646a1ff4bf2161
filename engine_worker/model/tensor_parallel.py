"""The ranks that compute one model together: what a network asks of the others during a forward pass.

    SINGLE         one rank: every operation hands back what it got, and launches nothing
    ProcessGroup   a process a rank, over torch.distributed: gloo on a CPU, NCCL on CUDA
    join_by()      a ProcessGroup of processes that find each other by a store of torch.distributed

Every rank makes the same calls in the same order with the same shapes. On CUDA all but minimum() are enqueued on the
current stream and may be captured in a graph: nothing in them waits for the device. It knows no network, and nothing of
steps: what a step is, ranks are told elsewhere. It is used at a start, where the ranks meet, and in every step, where
their parts are added up.
"""

import os
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from engine_worker.model.peer_sums import PeerMemory, PeerNorm, norms_rightly, sums_rightly

_JOIN_TIMEOUT = timedelta(minutes=10)  # of ranks that load at different speeds
_BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
# On a shared host a program that uses multicast (NVLS) can put the GPUs of others out of service.
_NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "NVSHMEM_DISABLE_NVLS": "1", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}


class TensorParallel(Protocol):
    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def peer_norm(self) -> PeerNorm | None:
        """Return what sums and norms at once, where the ranks have that."""

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Return the sum of `tensor` over the ranks, in its dtype and perhaps its place; the same bits on all."""

    def all_reduce_in_order(self, tensor: Tensor) -> Tensor:
        """Sum as all_reduce() does, rank after rank: an element's bits do not depend on where in `tensor` it stands."""

    def gather_logits(self, shard: Tensor, vocab_size: int, logits: Tensor | None = None) -> Tensor:
        """Return [N, vocab_size] on rank 0, written to `logits` if that is given; other ranks get their shard back.

        `shard` [N, ceil(vocab_size / size) or more] of each rank: columns past the vocabulary are left out.
        """

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Give `tensor` of rank 0 to all, in place."""

    def minimum(self, value: int) -> int:
        """Return the smallest of all ranks' values; waits for them."""


class SingleRank:
    """A group of one."""

    rank, size = 0, 1
    peer_norm: PeerNorm | None = None

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor

    def all_reduce_in_order(self, tensor: Tensor) -> Tensor:
        return tensor

    def gather_logits(self, shard: Tensor, vocab_size: int, logits: Tensor | None = None) -> Tensor:
        return shard

    def broadcast(self, tensor: Tensor) -> Tensor:
        return tensor

    def minimum(self, value: int) -> int:
        return value


SINGLE: TensorParallel = SingleRank()


class ProcessGroup:
    """A TensorParallel over an initialised group of torch.distributed.

    Sums are the backend's: NCCL's of bfloat16 are rounded to bfloat16 on the way. Both backends compute each element on
    one rank and hand it on, so all have the same bits. Of more than two ranks the order of a sum depends on where in
    the tensor the element stands.
    """

    def __init__(self, device: torch.device, group: dist.ProcessGroup | None = None) -> None:
        """`group`: torch's default one unless given. Connects the ranks, which a capture could not."""
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._device, self._group = device, group
        self._peers: PeerMemory | None = None
        self.peer_norm: PeerNorm | None = None
        self._connect()

    def reduce_by(self, peers: PeerMemory | None) -> bool:
        """Let `peers` sum what it serves, if it does so rightly on every rank; return whether it will.

        All ranks ask together. None: this rank has none, so no rank will use its own.
        """
        if self.minimum(int(peers is not None)) == 0 or peers is None:
            return False
        is_right = self.minimum(int(sums_rightly(peers, self, self._device))) == 1
        self._peers = peers if is_right else None
        return is_right

    def norm_by(self, peers: PeerNorm | None, hidden_size: int) -> bool:
        """Let `peers` sum and norm rows at once, if it does so rightly on every rank; as reduce_by()."""
        if self.minimum(int(peers is not None)) == 0 or peers is None:
            return False
        is_right = self.minimum(int(norms_rightly(peers, hidden_size, self, self._device))) == 1
        if is_right:
            peers.wait_for_ever()
            self.peer_norm = peers
        return is_right

    @property
    def all_reduce_path(self) -> str:
        """The name of what sums what a decode sums: that of the peers' memory, or of the backend."""
        return self._peers.name if self._peers is not None else _BACKENDS[self._device.type]

    def all_reduce(self, tensor: Tensor) -> Tensor:
        if self._peers is not None and self._peers.serves(tensor):
            return self._peers.all_reduce(tensor)
        if tensor.numel():  # a step may have no rows left, on all ranks alike
            dist.all_reduce(tensor, group=self._group)
        return tensor

    def all_reduce_in_order(self, tensor: Tensor) -> Tensor:
        if self.size == 2:  # a + b is b + a
            return self.all_reduce(tensor)
        if tensor.numel():
            parts = tensor.new_empty(self.size, *tensor.shape)
            dist.all_gather(list(parts.unbind()), tensor.contiguous(), group=self._group)
            tensor.copy_(parts[0])
            for part in parts[1:]:
                tensor.add_(part)
        return tensor

    def gather_logits(self, shard: Tensor, vocab_size: int, logits: Tensor | None = None) -> Tensor:
        parts = shard.new_empty(self.size, *shard.shape) if self.rank == 0 else None
        if shard.numel():
            received = list(parts.unbind()) if parts is not None else None
            dist.gather(shard.contiguous(), received, group=self._group, group_dst=0)
        if parts is None:
            return shard
        if logits is None:
            logits = shard.new_empty(len(shard), vocab_size)
        for columns, part in zip(logits.split(shard.shape[1], dim=1), parts, strict=False):
            columns.copy_(part[:, : columns.shape[1]])  # those past the vocabulary stand for no token
        return logits

    def broadcast(self, tensor: Tensor) -> Tensor:
        if tensor.numel():
            dist.broadcast(tensor, group=self._group, group_src=0)
        return tensor

    def minimum(self, value: int) -> int:
        smallest = torch.tensor(value, dtype=torch.int64, device=self._device)
        dist.all_reduce(smallest, dist.ReduceOp.MIN, group=self._group)
        return int(smallest)

    def close(self) -> None:
        """Leave in order; a group whose rank has died is left by ending the process."""
        dist.destroy_process_group(self._group)

    def _connect(self) -> None:
        """Use each operation once: NCCL connects what it needs when it first needs it."""
        self.all_reduce(torch.zeros(1, device=self._device))
        self.all_reduce_in_order(torch.zeros(1, device=self._device))
        self.gather_logits(torch.zeros(1, 1, device=self._device), self.size)
        self.broadcast(torch.zeros(1, device=self._device))
        self.minimum(0)


def join_by(store: Store, rank: int, size: int, device: torch.device, interface: str | None = "lo") -> ProcessGroup:
    """Wait for the `size` ranks and connect them, by a store that all reach.

    `interface`: the network interface over which they meet, of one host its loopback; None: whichever the libraries
    choose. On CUDA `device` has an index, and every rank sees the devices of all ranks of its host.
    """
    os.environ.update(_NO_MULTICAST)
    if interface is not None:
        os.environ.update(GLOO_SOCKET_IFNAME=interface, NCCL_SOCKET_IFNAME=interface)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        _BACKENDS[device.type],
        store=store,
        rank=rank,
        world_size=size,
        timeout=_JOIN_TIMEOUT,
        device_id=device if device.type == "cuda" else None,
    )
    return ProcessGroup(device)
