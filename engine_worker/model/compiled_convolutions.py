"""The short convolutions of one step on a CPU with the C++ kernel, directly on the block table."""

import torch
from torch import Tensor

from engine_worker.model.compiled_attention import CompiledAttentionPlan


class CompiledConvolutions:
    """What the convolutions of a step share: the pool and the block tables of its attention."""

    def __init__(self, plan: CompiledAttentionPlan, channels_of_layer: int) -> None:
        """Hold the plan of the step; a layer of the pool has room for `channels_of_layer` inputs of a token."""
        self._plan, self._channels = plan, channels_of_layer

    def convolve(
        self, rows: tuple[Tensor, Tensor, Tensor], weight: Tensor, bias: Tensor | None, layers: range
    ) -> Tensor:
        """Return a gated convolution; see Convolutions."""
        factor, gate, value = rows
        out = torch.empty(value.shape, dtype=value.dtype)
        for number, layer in enumerate(layers):
            part = slice(number * self._channels, (number + 1) * self._channels)
            own_bias = None if bias is None else bias[part]
            own_rows = factor[:, part], gate[:, part], value[:, part]
            self._plan.short_conv(own_rows, weight[part], own_bias, layer, out[:, part])
        return out
