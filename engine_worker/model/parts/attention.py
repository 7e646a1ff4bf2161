"""Attention with its linear layers: a mixer of a layer."""

import torch
from torch import Tensor

from engine_worker.model.devices import DeviceStep
from engine_worker.model.layers import AttentionWeights, NormOverRanks, NormShape, NormWeight
from engine_worker.model.linear import Input, LinearSpec
from engine_worker.model.parts.source import LayerSource
from engine_worker.model.rotary import rotary_order
from engine_worker.model.specs.attention import AttentionSpec, QkNorm
from engine_worker.model.specs.part import Role
from engine_worker.model.weights import WeightSource
from kernels.attention.score_rules import ScoreRules


class Attention:
    """The attention of one layer."""

    reads_plain = False

    def __init__(self, weights: AttentionWeights, layer: int) -> None:
        """Hold the weights; `layer` is the layer's place in the KV pool."""
        self._weights, self._layer = weights, layer
        self.scaling = weights.qkv.scaling

    def __call__(self, step: DeviceStep, x: Input, rows: Tensor | None = None) -> Tensor:
        """Store the KV of all rows of x [T, H] and return the outputs [N, H] of `rows`, or of all."""
        weights, spec = self._weights, self._weights.spec
        qkv, gate = self._stored(step, x)
        attended = step.attend(qkv, spec.scale, self._layer, rows, weights.rules)
        if gate is None:
            return weights.out(attended)
        of_rows = gate if rows is None else gate[rows]
        return weights.out(step.multiply_sigmoid(attended, of_rows, weights.out.scaling))

    def store(self, step: DeviceStep, x: Input) -> None:
        """Store the KV of all rows of x [T, H], and compute nothing else."""
        self._stored(step, x)

    def _stored(self, step: DeviceStep, x: Input) -> tuple[Tensor, Tensor | None]:
        """Store the KV of all rows. Return queries, keys and values, and the output gates if there are any."""
        weights, spec = self._weights, self._weights.spec
        qkv, gate = weights.qkv(x), None
        if spec.output_gate:
            qkv, gate = qkv[:, : -spec.query_size], qkv[:, -spec.query_size :]
            qkv = qkv.contiguous() if qkv.is_cuda else qkv  # kernels on a CPU read rows that are apart
        step.rotate_and_store(qkv, weights, self._layer)
        return qkv, gate


def load_attention(spec: AttentionSpec, source: LayerSource) -> Attention:
    """Load attention, with query and key rows, biases and norms in the order of rotary.py.

    Raises:
        ValueError: If a tensor is missing or has another shape.
    """
    names, prefix, norm, weights = source.names, source.prefix, source.norm, source.weights
    order = rotary_order(spec.rope, spec.head_dim)
    qkv = LinearSpec(
        role=Role.QKV,
        names=tuple(prefix + name for name in names.qkv),
        outputs=spec.qkv_sizes,
        inputs=source.mixer_inputs or norm.size,
        bias=spec.qkv_bias,
        row_order=_row_order(spec, order),
    )
    out = LinearSpec(
        role=Role.OUT,
        names=(prefix + names.out,),
        outputs=(norm.size,),
        inputs=spec.query_size,
        bias=spec.out_bias,
        is_summed=source.is_summed,
    )
    loaded = AttentionWeights(
        spec=spec,
        table=source.tables[spec.rope],
        qkv=source.method.load(qkv, weights),
        out=source.method.load(out, weights),
        query_norm=_qk_norm(weights, f"{prefix}{names.query_norm}.weight", spec, spec.num_heads, norm, order),
        key_norm=_qk_norm(weights, f"{prefix}{names.key_norm}.weight", spec, spec.num_kv_heads, norm, order),
        rules=ScoreRules(spec.window, spec.softcap, _sinks(weights, prefix + names.sinks, spec)),
    )
    return Attention(loaded, source.cache_layers.start)


def _sinks(source: WeightSource, name: str, spec: AttentionSpec) -> Tensor | None:
    """Return the sinks [Hq] in float32, as the C++ kernels read them."""
    return source.get(name, (spec.num_heads,)).float() if spec.sinks else None


def _row_order(spec: AttentionSpec, order: Tensor | None) -> Tensor | None:
    """Return the checkpoint's rows of queries, keys, values and gates; None: they are in this order.

    `order` is that of the elements of a query or key head.
    """
    if order is None and not spec.output_gate:
        return None
    rows = torch.arange(sum(spec.qkv_sizes)).view(-1, spec.head_dim)
    gates = rows[:0]
    if spec.output_gate:
        queries, gates = rows[: 2 * spec.num_heads : 2], rows[1 : 2 * spec.num_heads : 2]
        rows = torch.cat((queries, rows[2 * spec.num_heads :]))
    if order is not None:
        rows[: -spec.num_kv_heads] = rows[: -spec.num_kv_heads, order]
    return torch.cat((rows, gates)).flatten()


def _qk_norm(
    source: WeightSource, name: str, spec: AttentionSpec, num_heads: int, norm: NormShape, order: Tensor | None
) -> NormWeight | None:
    if spec.qk_norm is QkNorm.NONE:
        return None
    heads = 1 if spec.qk_norm is QkNorm.HEAD else num_heads
    weight = source.get(name, (heads * spec.head_dim,))
    if order is not None:
        weight = weight.view(heads, -1)[:, order.to(weight.device)].flatten()
    if spec.qk_norm is QkNorm.WHOLE and norm.ranks.size > 1:
        return NormOverRanks(norm.actual(weight), norm.eps, norm.ranks)
    return norm.weight(weight)
