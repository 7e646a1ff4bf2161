"""Parts of the network that are the same on every device but for the layout of their weights.

Plain callables, not nn.Module: a module's call costs 1-2 us and a decode step on a CPU makes 211 of them.

The parts are made once, at a worker's start; network.py walks through them in every step. The parts know no sequences.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from engine_worker.model.rotary import rotary_order
from engine_worker.model.spec import AttentionSpec, NamesSpec, QkNorm
from engine_worker.model.weights import WeightSource


class Linear:
    """x [T, in] -> [T, out]. `weight` is [out, in], `bias` [out]."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.is_packed = _is_packed(weight)
        # oneDNN's own layout halves the time of a bf16 product here: 1.1 against 2.7 ms for SmolLM2's head at T = 1.
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight) if self.is_packed else weight
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        if self.is_packed:
            product: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, self.weight, self.bias, "none", [], "")
            return product
        return F.linear(x, self.weight, self.bias)


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


@dataclass(frozen=True, slots=True)
class RotaryTable:
    """One of the rotary tables of a network."""

    index: int
    cos_sin: Tensor  # [max_len, D] float32


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    """The weights of attention between a layer's norms: products, rotation, norms of queries and keys."""

    spec: AttentionSpec
    rope_index: int  # layers of one network whose positions turn alike have the same one, and the same table
    cos_sin_table: Tensor  # [max_len, D] float32
    qkv: Linear
    out: Linear
    query_norm: NormWeight | None
    key_norm: NormWeight | None


def load_linear(
    source: WeightSource, names: Sequence[str], outputs: Sequence[int], inputs: int, *, bias: bool
) -> Linear:
    """One product out of one or several tensors of the checkpoint, `outputs` rows each."""
    weights = [source.get(f"{name}.weight", (rows, inputs)) for name, rows in zip(names, outputs, strict=True)]
    biases = [source.get(f"{name}.bias", (rows,)) for name, rows in zip(names, outputs, strict=True)] if bias else []
    return Linear(_joined(weights), _joined(biases) if biases else None)


def load_attention(
    source: WeightSource,
    names: NamesSpec,
    prefix: str,
    spec: AttentionSpec,
    hidden: int,
    eps: float,
    table: RotaryTable,
) -> AttentionWeights:
    """Rows of queries and keys are put into the order of rotary.py, with their biases and norms."""
    order = rotary_order(spec.rope, spec.head_dim)
    sizes = (spec.query_size, spec.kv_size, spec.kv_size)
    weight = _fused(source, [f"{prefix}{name}.weight" for name in names.qkv], sizes, (hidden,))
    bias = _fused(source, [f"{prefix}{name}.bias" for name in names.qkv], sizes, ()) if spec.qkv_bias else None
    return AttentionWeights(
        spec=spec,
        rope_index=table.index,
        cos_sin_table=table.cos_sin,
        qkv=Linear(_reordered(weight, spec, order), None if bias is None else _reordered(bias, spec, order)),
        out=load_linear(source, [prefix + names.out], [hidden], spec.query_size, bias=spec.out_bias),
        query_norm=_qk_norm(source, f"{prefix}{names.query_norm}.weight", spec, spec.num_heads, eps, order),
        key_norm=_qk_norm(source, f"{prefix}{names.key_norm}.weight", spec, spec.num_kv_heads, eps, order),
    )


def _fused(source: WeightSource, names: Sequence[str], sizes: tuple[int, ...], rest: tuple[int, ...]) -> Tensor:
    """Get the rows of one tensor that the checkpoint has fused already, or of one a size."""
    if len(names) == 1:
        return source.get(names[0], (sum(sizes), *rest))
    return torch.cat([source.get(name, (size, *rest)) for name, size in zip(names, sizes, strict=True)])


def _reordered(rows: Tensor, spec: AttentionSpec, order: Tensor | None) -> Tensor:
    """`rows` [(Hq + 2 Hkv) * D, ...] with the elements of every query and key head in `order`."""
    if order is None:
        return rows
    heads = rows.view(-1, spec.head_dim, *rows.shape[1:])
    rotated = heads[: -spec.num_kv_heads, order.to(rows.device)]
    return torch.cat((rotated, heads[-spec.num_kv_heads :])).view(rows.shape)


def _qk_norm(
    source: WeightSource, name: str, spec: AttentionSpec, num_heads: int, eps: float, order: Tensor | None
) -> NormWeight | None:
    if spec.qk_norm is QkNorm.NONE:
        return None
    heads = 1 if spec.qk_norm is QkNorm.HEAD else num_heads
    weight = source.get(name, (heads * spec.head_dim,))
    if order is not None:
        weight = weight.view(heads, -1)[:, order.to(weight.device)].flatten()
    return NormWeight(weight, eps)


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))
