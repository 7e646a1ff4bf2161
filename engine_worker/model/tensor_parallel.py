"""The ranks that compute one model together: the collective operations of a forward pass.

Every rank makes the same calls in the same order with the same shapes. On CUDA, all operations except minimum() are
enqueued on the current stream, can be captured in a graph, and do not wait for the device.
"""

import os
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from engine_worker.model.peer_sums import PeerMemory, PeerNorm, passes_norm_test, passes_sum_test

_JOIN_TIMEOUT = timedelta(minutes=10)  # ranks load at different speeds
_BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
# On a shared host, a program that uses multicast (NVLS) can disable the GPUs of other programs.
_NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "NVSHMEM_DISABLE_NVLS": "1", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}


class TensorParallel(Protocol):
    """The collective operations of a group of ranks."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def peer_norm(self) -> PeerNorm | None:
        """The fused sum and norm, if the ranks support it."""

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Return the sum over ranks in its dtype, possibly in place, with the same bits on all ranks."""

    def all_reduce_in_order(self, tensor: Tensor) -> Tensor:
        """Sum rank after rank, so that an element's bits do not depend on its position in `tensor`."""

    def gather_logits(self, shard: Tensor, vocab_size: int, logits: Tensor | None = None) -> Tensor:
        """Gather logits on rank 0; other ranks get their shard back.

        Args:
            shard: [N, ceil(vocab_size / size) or more]; columns beyond the vocabulary are dropped.
            vocab_size: Number of tokens.
            logits: [N, vocab_size] to write to on rank 0; default: a new tensor.

        Returns:
            [N, vocab_size] on rank 0, `shard` elsewhere.
        """

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Copy rank 0's `tensor` to all ranks, in place."""

    def minimum(self, value: int) -> int:
        """Return the minimum over all ranks; waits for them."""


class SingleRank:
    """A group of one rank: every operation returns its input and launches nothing."""

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
    """A TensorParallel over an initialized torch.distributed group: gloo on a CPU, NCCL on CUDA.

    NCCL rounds bfloat16 sums to bfloat16 at each step. Both backends compute each element on one rank and distribute
    it, so all ranks get the same bits. With more than two ranks, the order of a sum depends on the element's position.
    """

    def __init__(self, device: torch.device, group: dist.ProcessGroup | None = None) -> None:
        """Connect the ranks, which cannot happen during a graph capture; `group` defaults to torch's."""
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._device, self._group = device, group
        self._peers: PeerMemory | None = None
        self.peer_norm: PeerNorm | None = None
        self._connect()

    def reduce_by(self, peers: PeerMemory | None) -> bool:
        """Use `peers` for all-reduces that it supports, if it passes the self-test on every rank.

        All ranks must call this together. Pass None if this rank has no peer memory; then no rank uses it.

        Returns:
            Whether `peers` is used.
        """
        if self.minimum(int(peers is not None)) == 0 or peers is None:
            return False
        is_right = self.minimum(int(passes_sum_test(peers, self, self._device))) == 1
        self._peers = peers if is_right else None
        return is_right

    def norm_by(self, peers: PeerNorm | None, hidden_size: int) -> bool:
        """Use `peers` for fused sums and norms if it passes the self-test on every rank, like reduce_by()."""
        if self.minimum(int(peers is not None)) == 0 or peers is None:
            return False
        is_right = self.minimum(int(passes_norm_test(peers, hidden_size, self, self._device))) == 1
        if is_right:
            peers.wait_forever()
            self.peer_norm = peers
        return is_right

    @property
    def all_reduce_path(self) -> str:
        """The name of what serves the sums of a decode step: peer memory or the backend."""
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
            columns.copy_(part[:, : columns.shape[1]])  # columns beyond the vocabulary belong to no token
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
        """Leave the group in order; after the death of a rank, end the process instead."""
        dist.destroy_process_group(self._group)

    def _connect(self) -> None:
        """Use each operation once, because NCCL connects on first use."""
        self.all_reduce(torch.zeros(1, device=self._device))
        self.all_reduce_in_order(torch.zeros(1, device=self._device))
        self.gather_logits(torch.zeros(1, 1, device=self._device), self.size)
        self.broadcast(torch.zeros(1, device=self._device))
        self.minimum(0)


def join_by(store: Store, rank: int, size: int, device: torch.device, interface: str | None = "lo") -> ProcessGroup:
    """Wait for `size` ranks and connect them through a store that all reach.

    Args:
        store: A torch.distributed store.
        rank: This rank.
        size: Number of ranks.
        device: On CUDA with an index; every rank must see the devices of all ranks on its host.
        interface: Network interface between the ranks, the loopback for one host; None: chosen by the libraries.
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
