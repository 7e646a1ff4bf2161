"""The operators of one forward pass on a CPU in torch, besides the linear layers.

There are few operators, because at batch 1 each costs 2-10 us against 120 us of linear layers per layer (SmolLM2, 2
cores). What the layers share is computed once per step.
"""

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from engine_worker.kv.layout import Place
from engine_worker.model.convolutions import ConvolutionPlan
from engine_worker.model.cpu_attention import CpuAttention
from engine_worker.model.layers import AttentionWeights, NormOverRanks, NormWeight
from engine_worker.model.linear import Input
from engine_worker.model.model_input import ModelInput
from engine_worker.model.recurrent import RecurrentPlan
from engine_worker.model.spec import ModelShape
from engine_worker.model.specs.attention import QkNorm
from kernels.attention.score_rules import NO_RULES, ScoreRules
from kernels.fp8_kv import KVScales
from kernels.recurrent.reference import TorchRecurrent
from kernels.scaled import Scaled, Scaling


class CpuDevice:
    """State that outlives a step: attention over the KV pool, and rotary tables in the model's dtype."""

    def __init__(
        self,
        spec: ModelShape,
        kv_pool: Tensor,
        dtype: torch.dtype | None = None,
        kv_scales: Sequence[KVScales] = (),
        places: Sequence[Place] = (),
        states: Tensor | None = None,
    ) -> None:
        """Hold the pool.

        Args:
            spec: The model's shape.
            kv_pool: [num_blocks, P, 2, Hkv, BS, D].
            dtype: Dtype of the model; default: that of the pool.
            kv_scales: Per layer, for an e4m3 pool.
            places: As in attach_device().
            states: As in attach_device().
        """
        self.states, self.recurrent = states, TorchRecurrent()
        self.spec = spec
        self.dtype = dtype or kv_pool.dtype
        self.attention = CpuAttention(spec, kv_pool, self.dtype, kv_scales, places)
        self._tables: dict[int, Tensor] = {}  # by RotaryTable.index

    def table_of(self, attention: AttentionWeights) -> Tensor:
        """Return the rotary table in the model's dtype; the weights have it in float32."""
        index = attention.table.index
        if index not in self._tables:
            self._tables[index] = attention.table.cos_sin.to(self.dtype)
        return self._tables[index]

    def begin_step(self, model_input: ModelInput) -> "CpuStep":
        return CpuStep(self, model_input)


class CpuStep:
    def __init__(self, device: CpuDevice, model_input: ModelInput) -> None:
        spec = device.spec
        self._num_heads, self._num_kv_heads, self._head_dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
        self._query_size = spec.num_heads * spec.head_dim
        self._rotated_size = self._query_size + spec.num_kv_heads * spec.head_dim
        self._device, self._input, self._positions = device, model_input, model_input.positions
        self._angles: dict[int, tuple[Tensor, Tensor]] = {}
        self._plan = device.attention.begin(model_input)

    @cached_property
    def convolutions(self) -> ConvolutionPlan:
        attention = self._device.attention
        return ConvolutionPlan(attention.kv_pool, attention.groups.places, self._input)

    def multiply(self, x: Tensor, factor: float) -> Tensor:
        return x.mul_(factor)

    def multiply_sigmoid(self, x: Tensor, gate: Tensor, scaling: Scaling) -> Input:
        return self._device.recurrent.multiply_sigmoid(x, gate, scaling)

    @cached_property
    def recurrent(self) -> RecurrentPlan:
        return RecurrentPlan(self._device.recurrent, self._device.states, self._input)

    def add_rms_norm(self, x: Tensor, residual: Tensor, norm: NormWeight) -> tuple[Tensor, Tensor]:
        """Return (norm of x + residual, x + residual). Six operators take 17 us, F.rms_norm's twelve 26 us."""
        residual = x.add_(residual)
        exact = residual.to(torch.float32, copy=True)
        length = torch.linalg.vector_norm(exact, 2, -1, keepdim=True)
        return exact.div_(torch.hypot(length, norm.scaled_eps)).mul_(norm.scaled_weight).to(x.dtype), residual

    def add_rms_norm_quantized(
        self, x: Tensor, residual: Tensor, norm: NormWeight, scaling: Scaling, keeps_plain: bool
    ) -> tuple[Scaled, Tensor]:
        raise NotImplementedError("no linear layer on a CPU quantizes its inputs")

    def rms_norm(self, x: Tensor, norm: NormWeight) -> Tensor:
        """Norm over the last dimension."""
        if isinstance(norm, NormOverRanks):
            return norm(x)
        exact = x.to(torch.float32, copy=True)
        length = torch.linalg.vector_norm(exact, 2, -1, keepdim=True)
        return exact.div_(torch.hypot(length, norm.scaled_eps)).mul_(norm.scaled_weight).to(x.dtype)

    def rotate_and_store(self, qkv: Tensor, attention: AttentionWeights, layer: int) -> None:
        """Norm and rotate qkv [T, (Hq + 2 Hkv) * D] in place, then store keys and values."""
        self._norm_queries_and_keys(qkv, attention)
        cos, signed_sin = self._angles_of(attention)
        pairs = qkv[:, : self._rotated_size].view(len(qkv), self._num_heads + self._num_kv_heads, 2, -1)
        swapped = pairs.flip(2)
        pairs.mul_(cos).addcmul_(swapped, signed_sin)
        if attention.table.query_scales is not None:
            qkv[:, : self._query_size].mul_(attention.table.query_scales[self._positions, None])
        self.store(qkv, layer)

    def store(self, qkv: Tensor, layer: int) -> None:
        key_value = qkv[:, self._query_size :].view(len(qkv), -1, self._head_dim)
        self._plan.store(key_value, layer)

    def _norm_queries_and_keys(self, qkv: Tensor, attention: AttentionWeights) -> None:
        if attention.query_norm is None or attention.key_norm is None:
            return
        query, key = qkv[:, : self._query_size], qkv[:, self._query_size : self._rotated_size]
        if attention.spec.qk_norm is QkNorm.HEAD:
            query, key = (part.unflatten(1, (-1, self._head_dim)) for part in (query, key))
        query.copy_(self.rms_norm(query, attention.query_norm))
        key.copy_(self.rms_norm(key, attention.key_norm))

    def _angles_of(self, attention: AttentionWeights) -> tuple[Tensor, Tensor]:
        """Return cosines and signed sines of the step's positions; most layers share one table."""
        index = attention.table.index
        if index not in self._angles:
            rows = self._device.table_of(attention)[self._positions]
            cos, sin = rows.view(-1, 1, 2, self._head_dim // 2).chunk(2, dim=2)
            self._angles[index] = cos, torch.cat((-sin, sin), dim=2)
        return self._angles[index]

    def attend(
        self, qkv: Tensor, scale: float, layer: int, rows: Tensor | None = None, rules: ScoreRules = NO_RULES
    ) -> Tensor:
        """Attend with qkv as rotate_and_store() left it; return [T, Hq * D], or one row per entry of `rows`."""
        return self._plan.attend(qkv[:, : self._query_size], layer, scale, rules, rows)
