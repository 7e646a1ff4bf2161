"""Sums between devices that reach each other's memory: what such a way has to offer, and the trial that it must pass.

    PeerMemory       sums in place; symmetric_memory.py and paired_memory.py are such
    PeerNorm         a sum, added to the residual and normed, in one launch; peer_norm.py is one
    sums_rightly()   and norms_rightly(): whether it does so on this rank, of every size or number of rows

They are tried once, at a start, by all ranks together. It knows no network, and not how ranks meet.
"""

import logging
from typing import Protocol

import torch
from torch import Tensor

from kernels.scaled import Scaled

logger = logging.getLogger("worker")

_TRIED_ELEMENTS = tuple(2**exponent for exponent in range(6, 25))  # up to 32 MiB of bfloat16
_TRIED_ROWS = (1, 2, 36, 128, 256)
_TRIED_AGAIN = 3  # so that each slot of a buffer is written and then written over
_EPS = 1e-5


class Trial(Protocol):
    """The ranks as a trial asks them, by other means than the one that is tried."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    def all_reduce(self, tensor: Tensor) -> Tensor: ...
    def broadcast(self, tensor: Tensor) -> Tensor: ...


class PeerMemory(Protocol):
    name: str

    def serves(self, tensor: Tensor) -> bool: ...
    def all_reduce(self, tensor: Tensor) -> Tensor: ...


class PeerNorm(Protocol):
    def serves(self, part: Tensor) -> bool:
        """Whether the others take `part` [T, H]: a matter of its shape and type, so all ranks agree."""

    def add_rms_norm(self, part: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """-> (normed, residual + the sum of the ranks' parts), as rms_norm.py has them behind a sum"""

    def add_rms_norm_quantized(
        self, part: Tensor, residual: Tensor, weight: Tensor, eps: float, is_grouped: bool
    ) -> tuple[Scaled, Tensor]: ...

    def wait_for_ever(self) -> None:
        """For ranks that do not come, from now on; in a trial it gives them up, and its sums are wrong."""


def sums_rightly(peers: PeerMemory, ranks: Trial, device: torch.device) -> bool:
    """Whether sums of every size are those in float32, but for their rounding, and have the same bits as rank 0's."""
    is_right = True
    for num_elements in _TRIED_ELEMENTS:
        mine = _random(ranks, num_elements, device).to(torch.bfloat16)
        if not peers.serves(mine):
            continue
        found = peers.all_reduce(mine.clone()).clone()
        is_right &= _is_sum(found, ranks.all_reduce(mine.float()), ranks)
    return is_right


def norms_rightly(peers: PeerNorm, hidden_size: int, ranks: Trial, device: torch.device) -> bool:
    """Whether what they add is the sum in float32, but for its rounding, and normed so; with the same bits as rank 0's.

    Of two ranks the sum has one rounding, and the bits are those of any other way. Every number of rows is another use
    of the memory, and one width is one kernel, which is compiled here.
    """
    is_right = True
    # In the type of a network's norms, or another kernel would be compiled for these.
    weight = torch.linspace(0.5, 1.5, hidden_size, device=device).to(torch.bfloat16)
    for num_rows in _TRIED_ROWS:
        mine = _random(ranks, num_rows * hidden_size, device).to(torch.bfloat16).view(num_rows, hidden_size)
        if not peers.serves(mine):
            continue
        residual = weight.to(mine.dtype).expand(num_rows, hidden_size).contiguous()
        exact = ranks.all_reduce(mine.float())
        for _ in range(_TRIED_AGAIN):
            normed, added = _attempt(peers, mine, residual, weight)
            is_right &= _is_sum(added, exact + residual.float(), ranks)
            is_right &= ranks.size > 2 or torch.equal(added, exact.to(mine.dtype) + residual)
            is_right &= _is_norm(normed, added.float(), weight, ranks)
    return is_right


def _attempt(peers: PeerNorm, part: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    try:
        return peers.add_rms_norm(part, residual, weight, _EPS)
    except Exception as error:  # whatever a compiler raises: without this way the group serves as well
        logger.warning("sums and norms in one launch: %s", error)
        return torch.full_like(part, torch.nan), torch.full_like(part, torch.nan)


def _random(ranks: Trial, num_elements: int, device: torch.device) -> Tensor:
    generator = torch.Generator(device).manual_seed(ranks.rank)
    return torch.randn(num_elements, device=device, generator=generator)


def _is_sum(found: Tensor, exact: Tensor, ranks: Trial) -> bool:
    rounding = 2.0**-8 * ranks.size * exact.abs().amax()  # of each addition, at the largest sum
    of_first = ranks.broadcast(found.clone())
    return bool((found - exact).abs().amax() <= rounding) and torch.equal(found, of_first)


def _is_norm(found: Tensor, row: Tensor, weight: Tensor, ranks: Trial) -> bool:
    exact = row * torch.rsqrt(row.square().mean(-1, keepdim=True) + _EPS) * weight
    of_first = ranks.broadcast(found.clone())
    is_close = torch.allclose(found.float(), exact, rtol=2.0**-7, atol=2.0**-20)  # one rounding to eight bits
    return is_close and torch.equal(found, of_first)
