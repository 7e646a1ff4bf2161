"""A step's model input, computed directly from its sequences and without state, for comparison.

Rows are in the order of the CPU attention: decodes by length, then prefills by length.
"""

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
import torch

from engine_worker.kv.sequence import Sequence
from engine_worker.model.model_input import ModelInput
from engine_worker.scheduling.batch import ScheduledBatch, ScheduledSequence

_NONE: Mapping[Sequence, int] = MappingProxyType({})


def reference_model_input(
    batch: ScheduledBatch, block_size: int, inflight_token_ids: Mapping[Sequence, int] = _NONE
) -> ModelInput:
    """Build the input. `inflight_token_ids`: tokens sampled by the previous step and not yet in the sequences."""
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
    block_ids = block_tables[:, row_of_token, positions // block_size].astype(np.int64)
    slots = block_ids * block_size + positions % block_size
    last_row = {id(scheduled): int(end) - 1 for scheduled, end in zip(ordered, query_start_loc[1:], strict=True)}
    wanted, row = [], -1
    for scheduled in batch.sequences:
        row = last_row.get(id(scheduled), row)  # a fork without tokens samples from the previous row
        if scheduled.samples:
            wanted.append(row)

    def to_device(values: np.ndarray, dtype: type) -> torch.Tensor:
        return torch.from_numpy(values.astype(dtype, copy=False))

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
    """Return [G, S, B] blocks that hold tokens after this step; a table may have more, for the next step."""
    used_blocks = -(-ends // block_size)
    num_groups = len(ordered[0].sequence.kv.tables)
    tables = np.zeros((num_groups, len(ordered), int(used_blocks.max())), dtype=np.int32)
    for row, (scheduled, used) in enumerate(zip(ordered, used_blocks, strict=True)):
        for group, table in enumerate(scheduled.sequence.kv.tables):
            tables[group, row, :used] = table.blocks[:used]
    return tables
