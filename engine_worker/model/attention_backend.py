"""Attention over the paged KV cache as a device implements it: supported layers, and one plan per step.

A device makes its backend once, when the KV pool exists. A plan computes what the layers of a step share.
"""

from collections.abc import Callable, Iterable
from typing import Protocol, TypeAlias

from torch import Tensor

from engine_worker.model.model_input import ModelInput
from engine_worker.model.specs.attention import AttentionSpec
from kernels.attention.score_rules import ScoreRules

Supports: TypeAlias = Callable[[AttentionSpec, str], str]


class AttentionPlan(Protocol):
    def attend(self, query: Tensor, layer: int, scale: float, rules: ScoreRules, rows: Tensor | None = None) -> Tensor:
        """Attend in one layer. This step's keys and values must already be stored.

        Args:
            query: [T, Hq * D].
            layer: Index of the layer.
            scale: Factor of the scores.
            rules: Window, softcap and sinks.
            rows: int64 rows to compute; default: all.

        Returns:
            [T, Hq * D], or one row per entry of `rows`.
        """


class AttentionBackend(Protocol):
    @staticmethod
    def supports(spec: AttentionSpec, dtype: str) -> str:
        """Return why layers of `spec` with queries in `dtype` are not supported, or an empty string."""

    def begin(self, model_input: ModelInput) -> AttentionPlan: ...


def refuse_attention(layers: Iterable[AttentionSpec], dtype: str, device_type: str) -> None:
    """Refuse layers that the device does not support, before weights load.

    Raises:
        ValueError: With the backend's first reason.
    """
    supports = _supports(device_type)
    for spec in dict.fromkeys(layers):
        if reason := supports(spec, dtype):
            raise ValueError(f"--device {device_type}: {reason}. Use --device cpu")


def _supports(device_type: str) -> Supports:
    if device_type == "cuda":
        from engine_worker.model.cuda_attention import (  # noqa: PLC0415 - imports triton, which a CPU worker lacks
            CudaAttention,
        )

        return CudaAttention.supports
    from engine_worker.model.cpu_attention import CpuAttention  # noqa: PLC0415 - CPU only

    return CpuAttention.supports
