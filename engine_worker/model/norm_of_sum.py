"""A norm that takes the sum over ranks before it: o and down hand out their part, and who norms it adds the parts up.

    NormOfSum       stands where a NormWeight would, in a network of several ranks; NormShapes makes them
    add_norm()      the norm of hidden + residual, whether `hidden` is whole or a rank's part of it;
                    add_norm_quantized() for a product that takes it so

So the sum, the addition and the norm are one launch where the ranks reach each other's memory (kernels/sum_norm.py),
and what they are else: a sum, then the device's own norm. It knows no layer. It is used in every step of a group of
ranks, twice a layer.
"""

from dataclasses import dataclass

from torch import Tensor

from engine_worker.model.devices import DeviceStep
from engine_worker.model.layers import NormShape, NormWeight
from engine_worker.model.linear import Scaling
from engine_worker.model.peer_sums import PeerNorm
from engine_worker.model.spec import LayerSpec
from engine_worker.model.tensor_parallel import TensorParallel
from kernels.scaled import Scaled


class NormOfSum(NormWeight):
    """The scale of an RMSNorm of rows of which each rank has a part."""

    def __init__(self, weight: Tensor, eps: float, ranks: TensorParallel, is_deterministic: bool) -> None:
        super().__init__(weight, eps)
        self._ranks = ranks
        self._all_reduce = ranks.all_reduce_in_order if is_deterministic else ranks.all_reduce
        # Longer sums are rounded once there and at each addition in order: a row's bits would depend on its batch.
        self._may_fuse = ranks.size == 2 or not is_deterministic

    def peers(self, part: Tensor) -> PeerNorm | None:
        """Who sums and norms `part` at once, if anybody does."""
        peers = self._ranks.peer_norm if self._may_fuse else None
        return peers if peers is not None and peers.serves(part) else None

    def summed(self, part: Tensor) -> Tensor:
        """Perhaps in its place."""
        return self._all_reduce(part)


@dataclass(frozen=True, slots=True)
class NormShapes(NormShape):
    takes_sums: bool = False
    is_deterministic: bool = False

    def of_sum(self, stored: Tensor) -> NormWeight:
        """The norm behind a product that ranks share."""
        if not self.takes_sums:
            return self.weight(stored)
        return NormOfSum(self.actual(stored), self.eps, self.ranks, self.is_deterministic)


def add_norm(step: DeviceStep, hidden: Tensor, residual: Tensor, norm: NormWeight) -> tuple[Tensor, Tensor]:
    """-> (normed, residual + hidden). `hidden` is a rank's part where `norm` is of a sum."""
    if isinstance(norm, NormOfSum):
        if (peers := norm.peers(hidden)) is not None:
            return peers.add_rms_norm(hidden, residual, norm.weight, norm.eps)
        hidden = norm.summed(hidden)
    return step.add_rms_norm(hidden, residual, norm)


def add_norm_quantized(
    step: DeviceStep, hidden: Tensor, residual: Tensor, norm: NormWeight, scaling: Scaling
) -> tuple[Scaled, Tensor]:
    """As add_norm(); the first result is quantized."""
    if isinstance(norm, NormOfSum):
        if (peers := norm.peers(hidden)) is not None:
            is_grouped = scaling is Scaling.GROUPS
            return peers.add_rms_norm_quantized(hidden, residual, norm.weight, norm.eps, is_grouped)
        hidden = norm.summed(hidden)
    return step.add_rms_norm_quantized(hidden, residual, norm, scaling)


def takes_sums(layers: tuple[LayerSpec, ...], ranks: TensorParallel) -> bool:
    """Whether all that a product over ranks adds goes as it is into a norm: of families that norm or scale it, not."""
    return ranks.size > 1 and all(
        layer.norms_before and not layer.norms_after and layer.residual_scale == 1.0 for layer in layers
    )
