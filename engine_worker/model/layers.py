"""Parts of the network that are the same on every device but for the layout of their weights.

Plain callables, not nn.Module: a module's call costs 1-2 us and a decode step on a CPU makes 211 of them.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from engine_worker.model.config import ModelConfig, RopeScaling


class Linear:
    """x [T, in] -> [T, out], without a bias. `weight` is [out, in]."""

    def __init__(self, weight: Tensor) -> None:
        self.is_packed = _is_packed(weight)
        # oneDNN's own layout halves the time of a bf16 product here: 1.1 against 2.7 ms for SmolLM2's head at T = 1.
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight) if self.is_packed else weight

    def __call__(self, x: Tensor) -> Tensor:
        if self.is_packed:
            return torch.ops.mkldnn._linear_pointwise.default(x, self.weight, None, "none", [], "")
        return F.linear(x, self.weight)


class OutputHead:
    """x [N, H] -> logits [N, V] in float32: the sums as they were accumulated, whatever the dtype of the weights.

    Rounded to bfloat16, logits between 16 and 32 are multiples of 1/8, and the two likeliest tokens are often one value
    (ADR 0101).
    """

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight
        if weight.device.type == "cpu":
            # What oneDNN does not multiply in bfloat16 is multiplied in float32.
            self._linear = Linear(weight if _is_packed(weight) else weight.float())

    def on_cpu(self, x: Tensor) -> Tensor:
        linear = self._linear
        if not linear.is_packed:
            return linear(x.to(linear.weight.dtype))
        # oneDNN's product has the type of its inputs. A second one subtracts the first before it rounds, so both
        # together have 16 bits: as long as reading a float32 copy of the head for one row, a third of it for 64.
        rounded = linear(x)
        rest = torch.ops.mkldnn._linear_pointwise.binary(x, rounded, linear.weight, None, "sub")
        return rounded.float().add_(rest)

    def on_cuda(self, x: Tensor, logits: Tensor) -> Tensor:
        """Writes `logits`, and returns them."""
        if x.dtype == torch.float32:
            return torch.mm(x, self.weight.T, out=logits)
        return torch.mm(x, self.weight.T, out_dtype=torch.float32, out=logits)


def _is_packed(weight: Tensor) -> bool:
    is_bfloat16 = weight.device.type == "cpu" and weight.dtype == torch.bfloat16
    return is_bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()


class NormWeight:
    """The scale of one RMSNorm, and the constants that a CPU would compute again for every token.

    x / sqrt(mean(x^2) + eps) * weight = x / hypot(norm(x), sqrt(H * eps)) * (sqrt(H) * weight)
    """

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight, self.eps = weight, eps
        self.scaled_weight = weight.float() * math.sqrt(len(weight))
        self.scaled_eps = torch.tensor(math.sqrt(len(weight) * eps), device=weight.device)


class RotaryEmbedding:
    """cos_sin_table [max_len, D] float32: D / 2 cosines, then D / 2 sines, of each position."""

    def __init__(self, config: ModelConfig, max_len: int, device: torch.device) -> None:
        self.cos_sin_table = _cos_sin_table(config, max_len).to(device)


def _cos_sin_table(config: ModelConfig, max_len: int) -> Tensor:
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequencies = _scaled(1.0 / config.rope_theta**exponents, config.rope_scaling)
    angles = torch.arange(max_len, dtype=torch.float32)[:, None] * frequencies
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


def _scaled(frequencies: Tensor, scaling: RopeScaling | None) -> Tensor:
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    # Llama 3: wavelengths that fit often into the original context stay, those longer than it are stretched by
    # `factor`, and between the two bounds the frequency goes linearly from one to the other.
    wavelengths = 2 * math.pi / frequencies
    turns = scaling.original_max_position_embeddings / wavelengths
    smooth = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    smooth = smooth.clamp(0.0, 1.0)
    return (1 - smooth) * frequencies / scaling.factor + smooth * frequencies
