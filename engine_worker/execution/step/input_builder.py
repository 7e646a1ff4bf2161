"""Convert a StepDescription to the tensors of one forward pass on a CPU. persistent_inputs.py does it on CUDA."""

from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine_worker.execution.step.step_description import StepDescription
from engine_worker.model.model_input import DraftedRows, ModelInput
from kernels.draft_inputs_reference import LastDrafts
from kernels.recurrent.batch import DraftedStates


class StepInputs(Protocol):
    """Builder of the model's inputs of a step: HostInputs or PersistentInputs."""

    def unpack(self, description: StepDescription, size: int | None = None) -> ModelInput:
        """Return the inputs of a step, padded to `size` rows and tokens if it is given."""

    def keep_samples(self, token_ids: Tensor) -> None:
        """Keep the token ids sampled by the last unpacked step (int64, on the device) for the next step's feedback."""


class HostInputs:
    """Inputs on a CPU, where sampled tokens are known at once."""

    def __init__(self, block_size: int, last_drafts: LastDrafts | None = None, max_joined: int = 1) -> None:
        """`last_drafts`: what a draft head left, read by the next step. `max_joined`: see ModelInput."""
        self._block_size, self._last_drafts, self._max_joined = block_size, last_drafts, max_joined
        self._sampled: NDArray[np.int64] = np.zeros(0, dtype=np.int64)

    def unpack(self, description: StepDescription, size: int | None = None) -> ModelInput:
        assert size is None, "a CPU has no graphs and needs no padding"
        return build_model_input(description, self._block_size, self._sampled, self._last_drafts, self._max_joined)

    def keep_samples(self, token_ids: Tensor) -> None:
        self._sampled = token_ids.numpy().copy()


def build_model_input(
    description: StepDescription,
    block_size: int,
    sampled: NDArray[np.int64],
    last: LastDrafts | None,
    max_joined: int,
) -> ModelInput:
    """Return the inputs of a step.

    Args:
        description: The step.
        block_size: Tokens in a KV block.
        sampled: [N], int64, the tokens sampled by the previous step.
        last: What a draft head made of the previous step.
        max_joined: See ModelInput.
    """
    starts, ends = description.query_start_loc.astype(np.int64), description.seq_lens.astype(np.int64)
    row_of_token = np.repeat(np.arange(description.num_sequences), np.diff(starts))
    token_ids = description.token_ids.astype(np.int64)
    in_flight = description.feedback >= 0
    token_ids[starts[:-1][in_flight]] = sampled[description.feedback[in_flight]]
    lowered = np.zeros_like(ends)
    if last is not None:
        for row in np.flatnonzero(description.feedback < -1):
            token_ids[starts[row]], position = _draft(last, int(description.feedback[row]))
            lowered[row] = ends[row] - 1 - position
        ends -= lowered
    positions = np.arange(len(token_ids)) + (ends - starts[1:])[row_of_token]
    block_ids = description.block_tables[:, row_of_token, positions // block_size].astype(np.int64, order="C")
    return ModelInput(
        token_ids=torch.from_numpy(token_ids),
        positions=torch.from_numpy(positions),
        slot_mapping=torch.from_numpy(block_ids * block_size + positions % block_size),
        query_start_loc=torch.from_numpy(description.query_start_loc),
        seq_lens=torch.from_numpy(ends.astype(np.int32)),
        block_tables=torch.from_numpy(description.block_tables),
        logits_indices=torch.from_numpy(description.logits_indices.astype(np.int64)),
        max_query_len=description.max_query_len,
        max_seq_len=description.max_seq_len,
        lowered=torch.from_numpy(lowered[row_of_token]) if last is not None else None,
        state_blocks=torch.from_numpy(description.state_blocks) if len(description.state_blocks) else None,
        drafted_rows=_drafted_rows(description, lowered),
        max_joined=max_joined,
    )


def _drafted_rows(description: StepDescription, lowered: NDArray[np.int64]) -> DraftedRows | None:
    """Return the rows of recurrent layers. A sequence has fewer pending tokens if its length is `lowered` [S]."""
    if not description.drafted_states.shape[1]:
        return None
    ends, pending, kept = description.drafted_states
    fewer = np.where(pending > 0, lowered, 0)  # a row without tokens has none
    starts = torch.from_numpy(np.concatenate(([0], ends)).astype(np.int32))
    counts = (torch.from_numpy((count - fewer).astype(np.int32)) for count in (pending, kept))
    return DraftedRows(starts, DraftedStates(*counts))


def _draft(last: LastDrafts, feedback: int) -> tuple[int, int]:
    """Return token and position of a row that the previous step drafted; see unpack_inputs()."""
    sequence, number = divmod(-2 - feedback, 8)
    position = int(last.kept_positions[sequence]) + 1 + number
    if number == 0:
        return int(last.next_token_ids[last.kept_rows[sequence]]), position
    return int(last.drafts[number - 1, sequence]), position
