"""A ScheduledBatch as the tensors of one forward pass, on a CPU; persistent_inputs.py makes those of CUDA.

Rows are ordered for the CPU's attention: sequences that decode first, by ascending length, then those that prefill.
Nobody outside notices: logits_indices leads back to the order of the batch.

In the middle of a step on a CPU: the model runner asks for them between the scheduler's batch and the forward pass. It
knows nothing of why a sequence is in the step, of weights or of sampling.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol

import numpy as np
import torch

from engine_worker.model.model_input import ModelInput
from engine_worker.scheduling.batch import ScheduledBatch, ScheduledSequence
from engine_worker.scheduling.sequence import Sequence

_NONE: Mapping[Sequence, int] = MappingProxyType({})


class StepInputs(Protocol):
    """A maker of the network's inputs of a batch; PersistentInputs on CUDA."""

    def fill(self, batch: ScheduledBatch, size: int | None = None) -> ModelInput:
        """`size`: pad to as many rows and tokens."""

    def rows_of(self, batch: ScheduledBatch) -> list[ScheduledSequence]:
        """The scheduled sequences with tokens, in the order in which their tokens stand in the network's input."""

    def keep_samples(self, sequences: list[Sequence], token_ids: torch.Tensor) -> None:
        """`token_ids[i]` is the token in flight of `sequences[i]` when the next step begins."""


class HostInputs:
    """Inputs on a CPU, where what a step sampled is known at once."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._inflight_token_ids: dict[Sequence, int] = {}

    def fill(self, batch: ScheduledBatch, size: int | None = None) -> ModelInput:
        assert size is None, "nothing is padded here"
        return build_model_input(batch, self._block_size, torch.device("cpu"), self._inflight_token_ids)

    def rows_of(self, batch: ScheduledBatch) -> list[ScheduledSequence]:
        return _in_row_order(batch)

    def keep_samples(self, sequences: list[Sequence], token_ids: torch.Tensor) -> None:
        self._inflight_token_ids = dict(zip(sequences, token_ids.tolist(), strict=True))


def build_model_input(
    batch: ScheduledBatch, block_size: int, device: torch.device, inflight_token_ids: Mapping[Sequence, int] = _NONE
) -> ModelInput:
    """`inflight_token_ids`: what the step before sampled, for sequences that do not know it yet."""
    ordered = _in_row_order(batch)
    query_lens = np.array([scheduled.num_new_tokens for scheduled in ordered], dtype=np.int64)
    ends = np.array([scheduled.end for scheduled in ordered], dtype=np.int64)
    query_start_loc = np.concatenate(([0], np.cumsum(query_lens)))
    block_tables = _block_tables(ordered, ends, block_size)
    token_ids: list[int] = []
    for scheduled in ordered:
        sequence = scheduled.sequence
        if scheduled.end > sequence.num_known_tokens:
            token_ids.append(inflight_token_ids[sequence])
        else:
            token_ids += sequence.token_ids(scheduled.start, scheduled.end)
    row_of_token = np.repeat(np.arange(len(ordered)), query_lens)
    positions = np.arange(len(token_ids)) + (ends - query_start_loc[1:])[row_of_token]
    slots = block_tables[row_of_token, positions // block_size].astype(np.int64) * block_size + positions % block_size
    last_row = {id(scheduled): int(end) - 1 for scheduled, end in zip(ordered, query_start_loc[1:], strict=True)}
    wanted, row = [], -1
    for scheduled in batch.sequences:
        row = last_row.get(id(scheduled), row)  # a fork without tokens samples of the row before it
        if scheduled.samples:
            wanted.append(row)

    def to_device(values: np.ndarray, dtype: type) -> torch.Tensor:
        return torch.from_numpy(values.astype(dtype, copy=False)).to(device, non_blocking=True)

    return ModelInput(
        token_ids=to_device(np.array(token_ids), np.int64),
        positions=to_device(positions, np.int64),
        slot_mapping=to_device(slots, np.int64),
        query_start_loc=to_device(query_start_loc, np.int32),
        seq_lens=to_device(ends, np.int32),
        block_tables=to_device(block_tables, np.int32),
        logits_indices=to_device(np.array(wanted, dtype=np.int64), np.int64),
        max_query_len=int(query_lens.max()),
        max_seq_len=int(ends.max()),
    )


def _in_row_order(batch: ScheduledBatch) -> list[ScheduledSequence]:
    return sorted((scheduled for scheduled in batch.sequences if scheduled.num_new_tokens), key=_row_order)


def _row_order(scheduled: ScheduledSequence) -> tuple[bool, int]:
    return scheduled.num_new_tokens > 1, scheduled.end


def _block_tables(ordered: list[ScheduledSequence], ends: np.ndarray, block_size: int) -> np.ndarray:
    """[S, B] of the blocks that hold tokens after this step; a table may already have more, for the next one."""
    used_blocks = -(-ends // block_size)
    tables = np.zeros((len(ordered), int(used_blocks.max())), dtype=np.int32)
    for row, (scheduled, used) in enumerate(zip(ordered, used_blocks, strict=True)):
        tables[row, :used] = scheduled.sequence.block_table[:used]
    return tables
