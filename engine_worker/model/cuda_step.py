"""The operators of one forward pass on CUDA besides the linear layers: Triton kernels."""

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from engine_worker.kv.layout import Place
from engine_worker.model.cuda_attention import CudaAttention
from engine_worker.model.cuda_convolutions import CudaConvolutions
from engine_worker.model.layers import AttentionWeights, NormOverRanks, NormWeight
from engine_worker.model.linear import Input
from engine_worker.model.model_input import ModelInput
from engine_worker.model.recurrent import RecurrentPlan
from engine_worker.model.spec import ModelShape
from engine_worker.model.specs.attention import QkNorm
from kernels.attention.score_rules import NO_RULES, ScoreRules
from kernels.fp8_kv import KVScales
from kernels.recurrent.triton_kernels import TritonRecurrent
from kernels.rms_norm import add_rms_norm, add_rms_norm_quantized, rms_norm
from kernels.rotary_embedding import QkNorms, RotaryInput, rotate_and_store
from kernels.scaled import Scaled, Scaling


class CudaDevice:
    """State that outlives a step: attention over the KV pool."""

    def __init__(
        self,
        spec: ModelShape,
        kv_pool: Tensor,
        is_deterministic: bool = False,
        kv_scales: Sequence[KVScales] = (),
        places: Sequence[Place] = (),
        states: Tensor | None = None,
    ) -> None:
        """Hold the pool; `kv_scales` are per layer for an e4m3 pool, and `places` as in attach_device()."""
        self.states, self.recurrent = states, TritonRecurrent(is_deterministic)
        self.spec = spec
        self.attention = CudaAttention(spec, kv_pool, is_deterministic, kv_scales, places)
        # The table of one position that rotates nothing: x * 1 - y * 0 is x.
        self.unrotated = torch.cat((torch.ones(1, spec.head_dim // 2), torch.zeros(1, spec.head_dim // 2)), dim=1)
        self.unrotated = self.unrotated.to(kv_pool.device)

    def begin_step(self, model_input: ModelInput) -> "CudaStep":
        return CudaStep(self, model_input)


class CudaStep:
    def __init__(self, device: CudaDevice, model_input: ModelInput) -> None:
        self._device = device
        self._input = model_input
        self._plan = device.attention.begin(model_input)

    @cached_property
    def convolutions(self) -> CudaConvolutions:
        attention = self._device.attention
        return CudaConvolutions(attention.kv_pool, attention.groups.places, self._input)

    def multiply(self, x: Tensor, factor: float) -> Tensor:
        return x.mul_(factor)

    def multiply_sigmoid(self, x: Tensor, gate: Tensor, scaling: Scaling) -> Input:
        return self._device.recurrent.multiply_sigmoid(x, gate, scaling)

    @cached_property
    def recurrent(self) -> RecurrentPlan:
        return RecurrentPlan(self._device.recurrent, self._device.states, self._input)

    def add_rms_norm_quantized(
        self, x: Tensor, residual: Tensor, norm: NormWeight, scaling: Scaling, keeps_plain: bool
    ) -> tuple[Scaled, Tensor]:
        return add_rms_norm_quantized(x, residual, norm.weight, norm.eps, scaling is Scaling.GROUPS, keeps_plain)

    def add_rms_norm(self, x: Tensor, residual: Tensor, norm: NormWeight) -> tuple[Tensor, Tensor]:
        return add_rms_norm(x, residual, norm.weight, norm.eps)

    def rms_norm(self, x: Tensor, norm: NormWeight) -> Tensor:
        if isinstance(norm, NormOverRanks):
            return norm(x)
        return rms_norm(x, norm.weight, norm.eps)

    def rotate_and_store(self, qkv: Tensor, attention: AttentionWeights, layer: int) -> None:
        """Norm and rotate qkv [T, (Hq + 2 Hkv) * D] in place, then store keys and values."""
        inputs, spec = self._input, attention.spec
        norms: QkNorms | None = None
        if attention.query_norm is not None and attention.key_norm is not None:
            if spec.qk_norm is QkNorm.HEAD:
                norms = QkNorms(attention.query_norm.weight, attention.key_norm.weight, attention.key_norm.eps)
            else:
                query, key, _ = qkv.split((spec.query_size, spec.kv_size, spec.kv_size), dim=1)
                query.copy_(self.rms_norm(query, attention.query_norm))
                key.copy_(self.rms_norm(key, attention.key_norm))
        heads = qkv.view(len(qkv), -1, spec.head_dim)
        caches, scales = self._device.attention.layers[layer], self._device.attention.kv_scales[layer]
        table, slots = attention.table, self._slots_of(layer)
        rotate_and_store(
            RotaryInput(heads, inputs.positions, table.cos_sin, *caches, slots, norms, scales, table.query_scales)
        )

    def store(self, qkv: Tensor, layer: int) -> None:
        """Store keys and values of qkv [T, (Hq + 2 Hkv) * D] unrotated, with the rotate-and-store kernel."""
        device, inputs = self._device, self._input
        heads = qkv.view(len(qkv), -1, device.spec.head_dim)
        positions = torch.zeros_like(inputs.positions)
        caches, scales = device.attention.layers[layer], device.attention.kv_scales[layer]
        rotate_and_store(
            RotaryInput(heads, positions, device.unrotated, *caches, self._slots_of(layer), kv_scales=scales)
        )

    def _slots_of(self, layer: int) -> Tensor:
        group, _ = self._device.attention.groups.places[layer]
        return self._plan.slot_mappings[group]

    def attend(
        self, qkv: Tensor, scale: float, layer: int, rows: Tensor | None = None, rules: ScoreRules = NO_RULES
    ) -> Tensor:
        """Attend with qkv as rotate_and_store() left it; each row of `rows` is the last token of a sequence."""
        spec = self._device.spec
        return self._plan.attend(qkv[:, : spec.num_heads * spec.head_dim], layer, scale, rules, rows)
