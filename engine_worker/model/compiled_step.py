"""The operators of one forward pass on a CPU with the C++ kernels; cpu_step.py has them in torch.

A row's bits depend only on its own sequence (kernels/cpu/step.py).
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from engine_worker.kv.layout import Place
from engine_worker.model.compiled_attention import CompiledAttention
from engine_worker.model.compiled_convolutions import CompiledConvolutions
from engine_worker.model.layers import AttentionWeights, NormOverRanks, NormWeight
from engine_worker.model.linear import Input
from engine_worker.model.model_input import ModelInput
from engine_worker.model.recurrent import RecurrentPlan
from engine_worker.model.spec import ModelShape
from kernels.attention.score_rules import NO_RULES, ScoreRules
from kernels.cpu.build import NoLibrary
from kernels.cpu.library import cpu_library
from kernels.cpu.recurrent import CompiledRecurrent
from kernels.cpu.step import StepKernels
from kernels.fp8_kv import KVScales
from kernels.scaled import Scaled, Scaling


def step_kernels(shape: ModelShape, dtype: torch.dtype, kv_dtype: torch.dtype) -> StepKernels:
    """Return the kernels for this model.

    Raises:
        NoLibrary: With the reason why torch's operators are used instead.
    """
    try:
        return StepKernels(cpu_library(), shape.head_dim, dtype, kv_dtype)
    except ValueError as error:
        raise NoLibrary(str(error)) from None


class CompiledDevice:
    """State that outlives a step: attention over the KV pool."""

    def __init__(
        self,
        spec: ModelShape,
        kv_pool: Tensor,
        kernels: StepKernels,
        kv_scales: Sequence[KVScales] = (),
        places: Sequence[Place] = (),
        states: Tensor | None = None,
    ) -> None:
        """Hold the pool; `kv_scales` are per layer for an e4m3 pool, and `places` as in attach_device()."""
        self.states, self.recurrent = states, CompiledRecurrent(cpu_library(), kernels.dtype)
        self.spec, self.kernels = spec, kernels
        self.attention = CompiledAttention(spec, kv_pool, kernels, kv_scales, places)

    def begin_step(self, model_input: ModelInput) -> "CompiledStep":
        return CompiledStep(self, model_input)

    def begin_program(self, model_input: ModelInput) -> "CompiledStep":
        """Return a step that can be recorded, and then follow others of its shape."""
        blocks = model_input.state_blocks
        if blocks is None:
            return CompiledStep(self, model_input)
        own = replace(model_input, query_start_loc=model_input.query_start_loc.clone(), state_blocks=blocks.clone())
        return CompiledStep(self, own, is_followed=True)


class CompiledStep:
    def __init__(self, device: CompiledDevice, model_input: ModelInput, *, is_followed: bool = False) -> None:
        """Begin a step; `is_followed`: other steps of its shape take its place."""
        spec, self._kernels = device.spec, device.kernels
        self._input, self._is_followed = model_input, is_followed
        self._states, self._recurrent = device.states, device.recurrent
        self._query_size = spec.num_heads * spec.head_dim
        self._rotated_size = self._query_size + spec.num_kv_heads * spec.head_dim
        self._plan = device.attention.begin(model_input)

    @cached_property
    def convolutions(self) -> CompiledConvolutions:
        return CompiledConvolutions(self._plan, 2 * (self._rotated_size - self._query_size))

    def multiply(self, x: Tensor, factor: float) -> Tensor:
        return self._kernels.multiply(x, factor)

    def multiply_sigmoid(self, x: Tensor, gate: Tensor, scaling: Scaling) -> Input:
        return self._recurrent.multiply_sigmoid(x, gate, scaling)

    @cached_property
    def recurrent(self) -> RecurrentPlan:
        blocks, has_drafts = self._input.state_blocks, self._input.drafted_rows is not None
        assert blocks is not None, "the model has recurrent layers"
        may_keep_none = self._is_followed or has_drafts or not blocks.all()
        return RecurrentPlan(self._recurrent, self._states, self._input, may_keep_none=may_keep_none)

    def follow(self, model_input: ModelInput) -> None:
        """Point to another step of the same shape, for a recorded program."""
        self._plan.follow(model_input)
        if self._states is not None:
            self.recurrent.follow(model_input)

    def add_rms_norm(self, x: Tensor, residual: Tensor, norm: NormWeight) -> tuple[Tensor, Tensor]:
        """Return (norm of x + residual, x + residual)."""
        return self._kernels.add_rms_norm(x, residual, norm.scaled_weight, norm.eps), x

    def add_rms_norm_quantized(
        self, x: Tensor, residual: Tensor, norm: NormWeight, scaling: Scaling, keeps_plain: bool
    ) -> tuple[Scaled, Tensor]:
        raise NotImplementedError("no linear layer on a CPU quantizes its inputs")

    def rms_norm(self, x: Tensor, norm: NormWeight) -> Tensor:
        """Norm over the last dimension."""
        if isinstance(norm, NormOverRanks):
            return norm(x)
        return self._kernels.rms_norm(x, norm.scaled_weight, norm.eps)

    def rotate_and_store(self, qkv: Tensor, attention: AttentionWeights, layer: int) -> None:
        """Norm and rotate qkv [T, (Hq + 2 Hkv) * D] in place, then store keys and values."""
        self._norm_queries_and_keys(qkv, attention)
        self._plan.rotate_and_store(qkv, layer, attention.table.cos_sin, attention.table.query_scales)

    def store(self, qkv: Tensor, layer: int) -> None:
        self._plan.rotate_and_store(qkv, layer)

    def _norm_queries_and_keys(self, qkv: Tensor, attention: AttentionWeights) -> None:
        """Norm queries and keys; a weight of one head norms each head, one of all heads norms them together."""
        if attention.query_norm is None or attention.key_norm is None:
            return
        query, key = qkv[:, : self._query_size], qkv[:, self._query_size : self._rotated_size]
        for part, norm in ((query, attention.query_norm), (key, attention.key_norm)):
            if isinstance(norm, NormOverRanks):
                part.copy_(norm(part))
            else:
                self._kernels.rms_norm(part, norm.scaled_weight, norm.eps, out=part)

    def attend(
        self, qkv: Tensor, scale: float, layer: int, rows: Tensor | None = None, rules: ScoreRules = NO_RULES
    ) -> Tensor:
        """Attend with qkv as rotate_and_store() left it; return [T, Hq * D], or one row per entry of `rows`."""
        return self._plan.attend(qkv[:, : self._query_size], layer, scale, rules, rows)
