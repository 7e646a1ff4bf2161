"""Attention on a CPU with torch's operators: one plan of kernels/attention/cpu.py per window."""

from collections.abc import Sequence

import torch
from torch import Tensor

from engine_worker.kv.layout import Place
from engine_worker.model.layer_groups import LayerGroups
from engine_worker.model.model_input import ModelInput
from engine_worker.model.spec import ModelShape
from engine_worker.model.specs.attention import AttentionSpec
from kernels.attention.cpu import CacheLayout, GatherBuffer, PagedAttentionPlan, store_kv_cpu
from kernels.attention.score_rules import ScoreRules
from kernels.fp8_kv import UNIT_SCALES, KVScales


class CpuAttention:
    """The layers' views of the KV pool, and scratch memory for gathers."""

    def __init__(
        self,
        shape: ModelShape,
        kv_pool: Tensor,
        dtype: torch.dtype,
        kv_scales: Sequence[KVScales],
        places: Sequence[Place] = (),
    ) -> None:
        """Hold the views; `places` as in attach_device()."""
        scales = kv_scales or (UNIT_SCALES,) * len(shape.cache_layers)
        self.kv_pool, self.dtype = kv_pool, dtype
        self.layout = CacheLayout.of(kv_pool[:, 0, 0], kv_pool[:, 0, 1])
        self.groups = LayerGroups(shape.cache_layers, places)
        self.layers = [
            self.layout.layer(kv_pool[:, place, 0], layer_scales)
            for (_, place), layer_scales in zip(self.groups.places, scales, strict=True)
        ]
        self.buffer = GatherBuffer()

    @staticmethod
    def supports(spec: AttentionSpec, dtype: str) -> str:
        return ""  # supports all shapes and rules

    def begin(self, model_input: ModelInput) -> "CpuAttentionPlan":
        return CpuAttentionPlan(self, model_input)


class CpuAttentionPlan:
    def __init__(self, attention: CpuAttention, model_input: ModelInput) -> None:
        """Plan the step and zero the blocks that it starts."""
        self._layers = attention.layers
        self._groups = attention.groups.places
        self._plans = [  # per group, by window
            {window: _plan(attention, model_input, group, window) for window in windows}
            for group, windows in enumerate(attention.groups.windows)
        ]
        self._store_rows = []
        for plans, slots in zip(self._plans, model_input.slot_mapping, strict=True):
            first = next(iter(plans.values()))
            for block_id in first.started_blocks():
                attention.kv_pool[block_id].zero_()
            self._store_rows.append(first.store_rows(slots))

    def store(self, key_value: Tensor, layer: int) -> None:
        """Store key_value [T, 2 * Hkv, D]: the keys, then the values of each token."""
        store_kv_cpu(key_value, self._layers[layer], self._store_rows[self._groups[layer][0]])

    def attend(self, query: Tensor, layer: int, scale: float, rules: ScoreRules, rows: Tensor | None = None) -> Tensor:
        if rows is not None and len(rows) == 0:
            return query[rows]
        plan = self._plans[self._groups[layer][0]][rules.window]
        attended = plan.attend(query, self._layers[layer], scale, rules)
        return attended if rows is None else attended[rows]


def _plan(attention: CpuAttention, model_input: ModelInput, group: int, window: int) -> PagedAttentionPlan:
    return PagedAttentionPlan(
        attention.layout,
        model_input.block_tables[group],
        model_input.query_start_loc,
        model_input.seq_lens,
        attention.dtype,
        attention.buffer,
        window,
    )
