"""Attention on a CPU with the C++ kernels, directly on the block table: the AttentionBackend of CompiledStep."""

from collections.abc import Iterator, Sequence

from torch import Tensor

from engine_worker.kv.layout import Place
from engine_worker.model.layer_groups import LayerGroups
from engine_worker.model.model_input import ModelInput
from engine_worker.model.spec import ModelShape
from engine_worker.model.specs.attention import AttentionSpec
from kernels.attention.score_rules import ScoreRules
from kernels.cpu.step import StepKernels
from kernels.fp8_kv import UNIT_SCALES, KVScales


class CompiledAttention:
    """The KV pool, the layers' keys in it, and their scales."""

    def __init__(
        self,
        shape: ModelShape,
        kv_pool: Tensor,
        kernels: StepKernels,
        kv_scales: Sequence[KVScales] = (),
        places: Sequence[Place] = (),
    ) -> None:
        """Hold the views; `kv_scales` are per layer for an e4m3 pool, default 1; `places` as in attach_device()."""
        scales = kv_scales or (UNIT_SCALES,) * len(shape.cache_layers)
        self.kernels, self.kv_pool, self.num_heads = kernels, kv_pool, shape.num_heads
        places = LayerGroups(shape.cache_layers, places).places
        self.groups = [group for group, _ in places]  # by layer
        self.layers = [(kv_pool[:, place, 0], scales[layer]) for layer, (_, place) in enumerate(places)]

    @staticmethod
    def supports(spec: AttentionSpec, dtype: str) -> str:
        return ""  # layers that StepKernels cannot run use torch's operators

    def begin(self, model_input: ModelInput) -> "CompiledAttentionPlan":
        return CompiledAttentionPlan(self, model_input)


class CompiledAttentionPlan:
    def __init__(self, attention: CompiledAttention, model_input: ModelInput) -> None:
        self._kernels, self._layers, self._groups = attention.kernels, attention.layers, attention.groups
        self._arguments = [  # per group
            attention.kernels.begin(attention.kv_pool, attention.num_heads, *described)
            for described in _described(model_input)
        ]

    def follow(self, model_input: ModelInput) -> None:
        """Point to another step of the same shape, for a recorded program."""
        for arguments, described in zip(self._arguments, _described(model_input), strict=True):
            arguments.point_to(*described)

    def rotate_and_store(
        self, qkv: Tensor, layer: int, cos_sin: Tensor | None = None, query_scales: Tensor | None = None
    ) -> None:
        """Rotate qkv [T, (Hq + 2 Hkv) * D] in place by `cos_sin` [max_len, D], and store keys and values."""
        keys, scales = self._layers[layer]
        self._kernels.rotate_and_store(self._arguments[self._groups[layer]], qkv, cos_sin, keys, scales, query_scales)

    def short_conv(
        self, rows: tuple[Tensor, Tensor, Tensor], weight: Tensor, bias: Tensor | None, layer: int, out: Tensor
    ) -> None:
        """Convolve the channels whose inputs one layer has; see StepKernels."""
        keys, _ = self._layers[layer]
        self._kernels.short_conv(self._arguments[self._groups[layer]], rows, weight, bias, keys, out)

    def attend(self, query: Tensor, layer: int, scale: float, rules: ScoreRules, rows: Tensor | None = None) -> Tensor:
        """Attend in one layer; see AttentionPlan."""
        keys, scales = self._layers[layer]
        arguments = self._arguments[self._groups[layer]]
        return self._kernels.attend(arguments, query, keys, scale, rows, rules, scales)


def _described(model_input: ModelInput) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor, Tensor]]:
    """Yield per group the tensors of a step that the kernels read."""
    for block_tables, slots in zip(model_input.block_tables, model_input.slot_mapping, strict=True):
        yield block_tables, model_input.query_start_loc, model_input.seq_lens, model_input.positions, slots
