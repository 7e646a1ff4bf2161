"""Attention over the paged KV cache as a device has it: what it takes, and one plan for all layers of a step.

    refuse_attention(layers, dtype, device_type)   asks the device's backend before weights load
    backend.begin(model_input) -> plan             once a step: what its layers share is computed there
    plan.attend(query, layer, scale, rules)        once a layer; rows: of those tokens alone

A device makes its backend once, when the KV pool is there; that of CUDA is told then whether rows must not depend on
their batch. Knows no network and no family. It is on a block's walk, where every layer writes and reads it.
"""

from collections.abc import Callable, Iterable
from typing import Protocol, TypeAlias

from torch import Tensor

from engine_worker.model.model_input import ModelInput
from engine_worker.model.spec import AttentionSpec
from kernels.attention.score_rules import ScoreRules

Supports: TypeAlias = Callable[[AttentionSpec, str], str]


class AttentionPlan(Protocol):
    def attend(self, query: Tensor, layer: int, scale: float, rules: ScoreRules, rows: Tensor | None = None) -> Tensor:
        """query [T, Hq * D] -> [T, Hq * D], or of `rows` (int64) alone; this step's keys and values are stored."""


class AttentionBackend(Protocol):
    @staticmethod
    def supports(spec: AttentionSpec, dtype: str) -> str:
        """Why layers of `spec` whose queries are of `dtype` are not attended to; empty where they are."""

    def begin(self, model_input: ModelInput) -> AttentionPlan: ...


def refuse_attention(layers: Iterable[AttentionSpec], dtype: str, device_type: str) -> None:
    """Raises ValueError with the first reason of the device's backend."""
    supports = _supports(device_type)
    for spec in dict.fromkeys(layers):
        if reason := supports(spec, dtype):
            raise ValueError(f"--device {device_type}: {reason}. --device cpu serves them")


def _supports(device_type: str) -> Supports:
    if device_type == "cuda":
        from engine_worker.model.cuda_attention import (  # noqa: PLC0415 - imports triton, which a CPU has not
            CudaAttention,
        )

        return CudaAttention.supports
    from engine_worker.model.cpu_attention import CpuAttention  # noqa: PLC0415 - not where CUDA is

    return CpuAttention.supports
