"""Weights that depend only on their names, and steps of one sequence, without files or a scheduler."""

import zlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engine_worker.kv.layout import KVLayout
from engine_worker.model.devices import Device
from engine_worker.model.model_input import ModelInput
from engine_worker.model.served_model import ServedModel
from engine_worker.model.weights import RandomWeights

BLOCK_SIZE = 8


class NamedWeights(RandomWeights):
    """Weights drawn by numpy's frozen generator, seeded by the tensor's name; norms and biases are random too."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"), torch.float32)

    def _drawn(self, name: str, shape: tuple[int, ...]) -> Tensor:
        generator = np.random.RandomState(zlib.crc32(name.encode()))
        values = generator.uniform(0.5, 1.5, shape) if "norm" in name else generator.standard_normal(shape) * 0.2
        return torch.from_numpy(values.astype(np.float32))


def step(first: int, token_ids: Sequence[int]) -> ModelInput:
    """Return a step of one sequence in blocks 1, 2, ... that returns the logits of all its tokens."""
    num_blocks = max(4, -(-(first + len(token_ids)) // BLOCK_SIZE))
    positions = torch.arange(first, first + len(token_ids))
    return ModelInput(
        token_ids=torch.tensor(token_ids),
        positions=positions,
        slot_mapping=positions[None] + BLOCK_SIZE,
        query_start_loc=torch.tensor([0, len(token_ids)], dtype=torch.int32),
        seq_lens=torch.tensor([first + len(token_ids)], dtype=torch.int32),
        block_tables=torch.arange(1, num_blocks + 1, dtype=torch.int32)[None, None],
        logits_indices=torch.arange(len(token_ids)),
        max_query_len=len(token_ids),
        max_seq_len=first + len(token_ids),
        state_blocks=torch.ones(1, dtype=torch.int32),
    )


def attached(model: ServedModel, layout: KVLayout, num_blocks: int = 5) -> Device:
    """Return a device with empty pools: the step of one sequence has its recurrent state in block 1."""
    return model.attach(torch.zeros(layout.pool_shape(num_blocks)), states=torch.zeros(2, *layout.state_shape))
