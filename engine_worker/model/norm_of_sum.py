"""RMSNorms that include the sum over ranks: o and down return their part, and the next norm adds the parts.

If ranks reach each other's memory, sum, residual addition and norm are one launch (kernels/sum_norm.py). Otherwise they
are an all-reduce followed by the device's norm.
"""

from dataclasses import dataclass

from torch import Tensor

from engine_worker.model.devices import DeviceStep
from engine_worker.model.layers import NormShape, NormWeight
from engine_worker.model.peer_sums import PeerNorm
from engine_worker.model.spec import LayerSpec
from engine_worker.model.tensor_parallel import TensorParallel
from kernels.scaled import Scaled, Scaling


class NormOfSum(NormWeight):
    """The weight of an RMSNorm. Its input is a sum over ranks."""

    def __init__(self, weight: Tensor, eps: float, ranks: TensorParallel, is_deterministic: bool) -> None:
        super().__init__(weight, eps)
        self._ranks = ranks
        self._all_reduce = ranks.all_reduce_in_order if is_deterministic else ranks.all_reduce
        # With more ranks the fused sum rounds once and the ordered sum at each addition, so a row's bits would depend
        # on which
        # one serves its batch.
        self._may_fuse = ranks.size == 2 or not is_deterministic

    def peers(self, part: Tensor) -> PeerNorm | None:
        """Return the fused sum and norm if it supports `part`."""
        peers = self._ranks.peer_norm if self._may_fuse else None
        return peers if peers is not None and peers.serves(part) else None

    def summed(self, part: Tensor) -> Tensor:
        """Return the sum over ranks, possibly in place."""
        return self._all_reduce(part)


@dataclass(frozen=True, slots=True)
class NormShapes(NormShape):
    takes_sums: bool = False
    is_deterministic: bool = False

    def of_sum(self, stored: Tensor) -> NormWeight:
        """Return the norm after a linear layer whose inputs are split over ranks."""
        if not self.takes_sums:
            return self.weight(stored)
        return NormOfSum(self.actual(stored), self.eps, self.ranks, self.is_deterministic)


def add_norm(step: DeviceStep, hidden: Tensor, residual: Tensor, norm: NormWeight) -> tuple[Tensor, Tensor]:
    """Return (norm of residual + hidden, residual + hidden); `hidden` may be a rank's part."""
    if isinstance(norm, NormOfSum):
        if (peers := norm.peers(hidden)) is not None:
            return peers.add_rms_norm(hidden, residual, norm.weight, norm.eps)
        hidden = norm.summed(hidden)
    return step.add_rms_norm(hidden, residual, norm)


def add_norm_quantized(
    step: DeviceStep, hidden: Tensor, residual: Tensor, norm: NormWeight, scaling: Scaling, keeps_plain: bool
) -> tuple[Scaled, Tensor]:
    """Compute add_norm() with a quantized norm, which also keeps the plain one if `keeps_plain`."""
    if isinstance(norm, NormOfSum):
        if (peers := norm.peers(hidden)) is not None:
            is_grouped = scaling is Scaling.GROUPS
            return peers.add_rms_norm_quantized(hidden, residual, norm.weight, norm.eps, is_grouped, keeps_plain)
        hidden = norm.summed(hidden)
    return step.add_rms_norm_quantized(hidden, residual, norm, scaling, keeps_plain)


def takes_sums(layers: tuple[LayerSpec, ...], ranks: TensorParallel) -> bool:
    """Return whether all sums over ranks go directly into a norm, not first through a norm or factor."""
    return ranks.size > 1 and all(
        layer.norms_before and not layer.norms_after and layer.residual_scale == 1.0 for layer in layers
    )
