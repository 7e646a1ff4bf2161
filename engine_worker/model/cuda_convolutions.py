"""The short convolutions of one step on CUDA, with their inputs in the KV pool."""

from collections.abc import Sequence

import torch
from torch import Tensor

from engine_worker.kv.layout import Place
from engine_worker.model.model_input import ModelInput
from kernels.short_conv_triton import ConvolvedTokens, sequences_of, short_conv_triton


class CudaConvolutions:
    """What the convolutions of a step share."""

    def __init__(self, kv_pool: Tensor, places: Sequence[Place], model_input: ModelInput) -> None:
        """Plan a step; arguments as for ConvolutionPlan."""
        self._pool, self._places, self._input = kv_pool, places, model_input
        self._sequences = sequences_of(model_input.query_start_loc, len(model_input.token_ids))

    def convolve(
        self, rows: tuple[Tensor, Tensor, Tensor], weight: Tensor, bias: Tensor | None, layers: range
    ) -> Tensor:
        """Return a gated convolution; see Convolutions."""
        factor, gate, value = rows
        x = factor * value
        _, _, _, num_kv_heads, _, head_dim = self._pool.shape
        size, out = 2 * num_kv_heads * head_dim, torch.empty_like(x)
        for number, layer in enumerate(layers):
            group, place = self._places[layer]
            part = slice(number * size, (number + 1) * size)
            short_conv_triton(
                x[:, part],
                weight[part],
                None if bias is None else bias[part],
                self._pool[:, place],
                self._tokens(group),
                out[:, part],
            )
        return gate * out

    def _tokens(self, group: int) -> ConvolvedTokens:
        step = self._input
        return ConvolvedTokens(
            self._sequences, step.query_start_loc, step.positions, step.slot_mapping[group], step.block_tables[group]
        )
