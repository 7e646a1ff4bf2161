"""Attention on CUDA with kernels/attention: one plan per step and window."""

from collections.abc import Sequence

import torch
from torch import Tensor

from engine_worker.kv.layout import Place
from engine_worker.model.layer_groups import LayerGroups
from engine_worker.model.model_input import ModelInput
from engine_worker.model.spec import ModelShape
from engine_worker.model.specs.attention import AttentionSpec
from kernels.attention.paged_attention import AttentionPlan, paged_attention
from kernels.attention.prefill import MAX_HEAD_DIM
from kernels.attention.score_rules import ScoreRules
from kernels.fp8_kv import UNIT_SCALES, KVScales

# Selecting rows takes four kernels of 4.5 us (profile of `bench engine-cases`); attention of 1,024 tokens takes 30 us.
MAX_WASTED_QUERY_ROWS = 512


class CudaAttention:
    """The layers' views of the KV pool; `is_deterministic` selects the batch-invariant kernel."""

    def __init__(
        self,
        shape: ModelShape,
        kv_pool: Tensor,
        is_deterministic: bool = False,
        kv_scales: Sequence[KVScales] = (),
        places: Sequence[Place] = (),
    ) -> None:
        """Hold the views; `kv_scales` are per layer for an e4m3 pool, and `places` as in attach_device()."""
        self.num_heads, self.head_dim, self.is_deterministic = shape.num_heads, shape.head_dim, is_deterministic
        self.groups = LayerGroups(shape.cache_layers, places)
        self.kv_pool = kv_pool
        self.layers = [(kv_pool[:, place, 0], kv_pool[:, place, 1]) for _, place in self.groups.places]
        self.kv_scales = kv_scales or (UNIT_SCALES,) * len(shape.cache_layers)

    @staticmethod
    def supports(spec: AttentionSpec, dtype: str) -> str:
        if spec.head_dim > MAX_HEAD_DIM or spec.head_dim % 2:
            return f"attention needs an even head size of at most {MAX_HEAD_DIM}; this model's is {spec.head_dim}"
        return ""

    def begin(self, model_input: ModelInput) -> "CudaAttentionPlan":
        return CudaAttentionPlan(self, model_input)


class CudaAttentionPlan:
    def __init__(self, attention: CudaAttention, model_input: ModelInput) -> None:
        self._attention, self._input = attention, model_input
        self._groups = attention.groups.places
        self._tables = model_input.block_tables.unbind()
        self.slot_mappings = model_input.slot_mapping.unbind()  # per group
        self._plans = [
            AttentionPlan(
                block_tables,
                model_input.query_start_loc,
                model_input.seq_lens,
                model_input.max_query_len,
                model_input.max_seq_len,
                attention.num_heads,
                attention.layers[0][0],
                one_kernel=attention.is_deterministic,
                windows=windows,
                max_joined=model_input.max_joined,
            )
            for block_tables, windows in zip(self._tables, attention.groups.windows, strict=True)
        ]

    def attend(self, query: Tensor, layer: int, scale: float, rules: ScoreRules, rows: Tensor | None = None) -> Tensor:
        """Attend in one layer; query [T, Hq * D] may be strided, and each row of `rows` ends a sequence."""
        attention = self._attention
        heads: Tensor = query.view(len(query), attention.num_heads, attention.head_dim)
        if rows is not None and len(rows) == 0:
            return heads[rows].flatten(1)
        if rows is not None and len(heads) - len(rows) > MAX_WASTED_QUERY_ROWS:
            return self._attend_last(heads[rows], layer, scale, rules, rows).flatten(1)
        caches, scales = attention.layers[layer], attention.kv_scales[layer]
        plan = self._plans[self._groups[layer][0]]
        attended = plan.attend(heads, *caches, scale, scales, rules).flatten(1)
        return attended if rows is None else attended[rows]

    def _attend_last(self, query: Tensor, layer: int, scale: float, rules: ScoreRules, rows: Tensor) -> Tensor:
        """Attend with query [N, Hq, D] of the tokens `rows`, as if their sequences were decoding."""
        inputs, attention = self._input, self._attention
        sequences = torch.searchsorted(inputs.query_start_loc, rows.int(), right=True) - 1
        starts = torch.arange(len(rows) + 1, dtype=torch.int32, device=query.device)
        return paged_attention(
            query,
            *attention.layers[layer],
            self._tables[self._groups[layer][0]][sequences],
            starts,
            inputs.seq_lens[sequences],
            1,
            inputs.max_seq_len,
            scale,
            one_kernel=attention.is_deterministic,
            kv_scales=attention.kv_scales[layer],
            rules=rules,
        )
