"""Interfaces of sums between GPUs with peer access, and the self-test that they must pass at start.

All ranks run the self-test together, over every size or number of rows.
"""

import logging
from typing import Protocol

import torch
from torch import Tensor

from kernels.scaled import Scaled

logger = logging.getLogger("worker")

_TEST_ELEMENTS = tuple(2**exponent for exponent in range(6, 25))  # up to 32 MiB of bfloat16
_TEST_ROWS = (1, 2, 36, 128, 256)
_TEST_REPEATS = 3  # so that each slot of a buffer is written and then overwritten
_EPS = 1e-5


class SelfTestRanks(Protocol):
    """The ranks as the self-test needs them, over an independent implementation."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    def all_reduce(self, tensor: Tensor) -> Tensor: ...
    def broadcast(self, tensor: Tensor) -> Tensor: ...


class PeerMemory(Protocol):
    """All-reduces in place; see symmetric_memory.py and paired_memory.py."""

    name: str

    def serves(self, tensor: Tensor) -> bool: ...
    def all_reduce(self, tensor: Tensor) -> Tensor: ...


class PeerNorm(Protocol):
    """Sum over ranks, residual addition and norm in one launch; see peer_norm.py."""

    def serves(self, part: Tensor) -> bool:
        """Return whether `part` [T, H] is supported, from its shape and dtype, so that all ranks agree."""

    def add_rms_norm(self, part: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Return (normed, residual + sum of the ranks' parts), equal to a sum followed by rms_norm.py."""

    def add_rms_norm_quantized(
        self, part: Tensor, residual: Tensor, weight: Tensor, eps: float, is_grouped: bool, keeps_plain: bool
    ) -> tuple[Scaled, Tensor]: ...

    def wait_forever(self) -> None:
        """Wait for ranks without limit from now on; in the self-test it gives up, and its sums are wrong."""


def passes_sum_test(peers: PeerMemory, ranks: SelfTestRanks, device: torch.device) -> bool:
    """Return whether sums of every size equal those in float32 up to rounding, with rank 0's bits on all ranks."""
    is_right = True
    for num_elements in _TEST_ELEMENTS:
        mine = _random(ranks, num_elements, device).to(torch.bfloat16)
        if not peers.serves(mine):
            continue
        found = peers.all_reduce(mine.clone()).clone()
        is_right &= _is_sum(found, ranks.all_reduce(mine.float()), ranks)
    return is_right


def passes_norm_test(peers: PeerNorm, hidden_size: int, ranks: SelfTestRanks, device: torch.device) -> bool:
    """Return whether fused sums and norms are right up to rounding, with rank 0's bits on all ranks.

    With two ranks the sum has one rounding and must equal any other implementation bit for bit. Each number of rows
    uses the memory differently. One width is one kernel, which is compiled here.
    """
    is_right = True
    # In the dtype of the network's norms; another dtype would compile another kernel.
    weight = torch.linspace(0.5, 1.5, hidden_size, device=device).to(torch.bfloat16)
    for num_rows in _TEST_ROWS:
        mine = _random(ranks, num_rows * hidden_size, device).to(torch.bfloat16).view(num_rows, hidden_size)
        if not peers.serves(mine):
            continue
        residual = weight.to(mine.dtype).expand(num_rows, hidden_size).contiguous()
        exact = ranks.all_reduce(mine.float())
        for _ in range(_TEST_REPEATS):
            normed, added = _attempt(peers, mine, residual, weight)
            is_right &= _is_sum(added, exact + residual.float(), ranks)
            is_right &= ranks.size > 2 or torch.equal(added, exact.to(mine.dtype) + residual)
            is_right &= _is_norm(normed, added.float(), weight, ranks)
    return is_right


def _attempt(peers: PeerNorm, part: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    try:
        return peers.add_rms_norm(part, residual, weight, _EPS)
    except Exception as error:  # any compiler error; the group also works without this path
        logger.warning("sum and norm: self-test failed: %s", error)
        return torch.full_like(part, torch.nan), torch.full_like(part, torch.nan)


def _random(ranks: SelfTestRanks, num_elements: int, device: torch.device) -> Tensor:
    generator = torch.Generator(device).manual_seed(ranks.rank)
    return torch.randn(num_elements, device=device, generator=generator)


def _is_sum(found: Tensor, exact: Tensor, ranks: SelfTestRanks) -> bool:
    rounding = 2.0**-8 * ranks.size * exact.abs().amax()  # rounding of each addition, at the largest sum
    of_first = ranks.broadcast(found.clone())
    return bool((found - exact).abs().amax() <= rounding) and torch.equal(found, of_first)


def _is_norm(found: Tensor, row: Tensor, weight: Tensor, ranks: SelfTestRanks) -> bool:
    exact = row * torch.rsqrt(row.square().mean(-1, keepdim=True) + _EPS) * weight
    of_first = ranks.broadcast(found.clone())
    is_close = torch.allclose(found.float(), exact, rtol=2.0**-7, atol=2.0**-20)  # one rounding to 8 bits
    return is_close and torch.equal(found, of_first)
