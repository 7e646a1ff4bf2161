"""The short convolutions of one step, with their inputs in the KV pool: the CPU's, and their protocol."""

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from engine_worker.kv.layout import Place
from engine_worker.model.model_input import ModelInput
from kernels.short_conv import convolve, read_inputs, store_inputs, window_slots


class Convolutions(Protocol):
    def convolve(
        self, rows: tuple[Tensor, Tensor, Tensor], weight: Tensor, bias: Tensor | None, layers: range
    ) -> Tensor:
        """Return a gated convolution.

        Args:
            rows: Factor, gate and value, [T, C] each. Inputs are factor * value, and stored in `layers` of the pool.
            weight: [C, width].
            bias: [C], or None.
            layers: Of the pool.

        Returns:
            [T, C], the outputs times the gate, in the dtype of the rows.
        """


class ConvolutionPlan:
    """What the convolutions of a step share."""

    def __init__(self, kv_pool: Tensor, places: Sequence[Place], model_input: ModelInput) -> None:
        """Plan a step.

        Args:
            kv_pool: [num_blocks, P, 2, Hkv, BS, D].
            places: The group and the place of each layer of the pool.
            model_input: The step.
        """
        self._pool, self._places, self._input = kv_pool, places, model_input
        self._windows: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}  # by group and width

    def convolve(
        self, rows: tuple[Tensor, Tensor, Tensor], weight: Tensor, bias: Tensor | None, layers: range
    ) -> Tensor:
        """Return a gated convolution; see Convolutions."""
        factor, gate, value = rows
        x = factor * value
        _, _, _, num_kv_heads, _, head_dim = self._pool.shape
        size = 2 * num_kv_heads * head_dim
        padded = F.pad(x, (0, size * len(layers) - x.shape[1]))
        parts = [
            self._stored(part, layer, weight.shape[1])
            for layer, part in zip(layers, padded.split(size, dim=1), strict=True)
        ]
        inputs = torch.cat(parts, dim=2)[:, :, : x.shape[1]]
        return gate * convolve(inputs, weight, bias).to(x.dtype)

    def _stored(self, part: Tensor, layer: int, width: int) -> Tensor:
        """Store a part of the inputs and return [T, width, size], those that each token's filter reads."""
        group, place = self._places[layer]
        cache = self._pool[:, place]
        store_inputs(cache, self._input.slot_mapping[group], part)
        slots, is_before = self._window(group, width)
        return read_inputs(cache, slots).masked_fill_(is_before[:, :, None], 0)

    def _window(self, group: int, width: int) -> tuple[Tensor, Tensor]:
        if (group, width) not in self._windows:
            step = self._input
            self._windows[group, width] = window_slots(
                step.block_tables[group], step.query_start_loc, step.positions, self._pool.shape[4], width
            )
        return self._windows[group, width]
