"""Inputs of a step on CUDA: its description in pinned memory, unpacked by one kernel into persistent tensors.

CUDA graphs read these tensors at fixed addresses; other steps get views of them. The kernel runs in stream order, after
the previous step has read its inputs, and takes tokens in flight from that step's samples. The host writes a step while
the previous one runs, so there are several pinned buffers; an event tells when one was read.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from engine_worker.execution.step.step_description import EMPTY, StepDescription
from engine_worker.model.model_input import DraftedRows, ModelInput
from kernels.draft_inputs_reference import LastDrafts
from kernels.recurrent.batch import DraftedStates
from kernels.unpack_inputs import DescribedBatch, InputTensors, unpack_inputs

# cuBLAS chooses a kernel by the number of rows. The driver loads a kernel at its first use, after all work of the GPU.
# In steps of 8,192 tokens this stopped all launches for 0.13 to 0.26 s. Padded to a few numbers of rows, the last layer
# and the head need few kernels, and the warm-up loads them all (ADR 0172).
_LOGIT_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 192, 256)
_LOGIT_ROWS_STRIDE = 128  # above these
NUM_DESCRIPTIONS = 3  # one is written, one may wait on the device, one is spare for a step without sequences


def padded_logit_rows(num_logits: int) -> int:
    """Return the number of rows for which a step without a graph computes logits."""
    above = -(-num_logits // _LOGIT_ROWS_STRIDE) * _LOGIT_ROWS_STRIDE
    return next((rows for rows in (0, *_LOGIT_ROWS) if num_logits <= rows), above)


@dataclass(frozen=True, kw_only=True)
class InputBounds:
    """The size of the tensors."""

    max_rows: int  # padding included
    max_tokens: int  # padding included
    max_model_len: int
    block_size: int
    num_groups: int = 1
    max_joined: int = 1  # see ModelInput


class PersistentInputs:
    def __init__(
        self,
        bounds: InputBounds,
        device: torch.device,
        *,
        has_states: bool = False,
        last_drafts: LastDrafts | None = None,
    ) -> None:
        """Allocate the tensors.

        `has_states`: sequences have recurrent states. `last_drafts`: see unpack_inputs().
        """
        max_rows, max_tokens, num_groups = bounds.max_rows, bounds.max_tokens, bounds.num_groups
        max_num_blocks = -(-bounds.max_model_len // bounds.block_size)
        self._bounds, self._last_drafts = bounds, last_drafts
        knows_drafts = has_states and bounds.max_joined > 1
        self._pinned = [
            _PinnedDescription(max_rows, max_tokens, num_groups * max_num_blocks, device, knows_drafts=knows_drafts)
            for _ in range(NUM_DESCRIPTIONS)
        ]
        self._tensors = InputTensors(
            token_ids=torch.zeros(max_tokens, dtype=torch.int64, device=device),
            positions=torch.zeros(max_tokens, dtype=torch.int64, device=device),
            slot_mapping=torch.zeros((num_groups, max_tokens), dtype=torch.int64, device=device),
            query_start_loc=torch.zeros(max_rows + 1, dtype=torch.int32, device=device),
            seq_lens=torch.zeros(max_rows, dtype=torch.int32, device=device),
            block_tables=torch.zeros((num_groups, max_rows, max_num_blocks), dtype=torch.int32, device=device),
            logits_indices=torch.zeros(padded_logit_rows(max_rows), dtype=torch.int64, device=device),
            lowered=torch.zeros(max_tokens, dtype=torch.int64, device=device),
            drafted_states=torch.zeros(3, max_rows + 1, dtype=torch.int32, device=device) if knows_drafts else None,
        )
        self._state_blocks = torch.zeros(max_rows, dtype=torch.int32, device=device) if has_states else None
        self._sampled_token_ids = torch.zeros(1, dtype=torch.int64, device=device)

    def unpack(self, description: StepDescription, size: int | None = None) -> ModelInput:
        """Enqueue the unpacking of a step, padded to `size` rows and tokens; nothing waits for the device.

        Without `size`, only the rows of logits are padded, with those of the first token. The next call's kernel
        overwrites the tensors.
        """
        pinned = self._pinned[0]
        self._pinned = [*self._pinned[1:], pinned]
        num_logits = description.num_logits if size else padded_logit_rows(description.num_logits)
        described = pinned.write(description)
        unpack_inputs(
            described,
            self._sampled_token_ids,
            self._tensors,
            size,
            self._bounds.block_size,
            num_logits,
            self._last_drafts,
        )
        self._copy_state_blocks(pinned)
        pinned.enqueued()
        return self.views(
            num_rows=size or description.num_sequences,
            num_tokens=size or description.num_tokens,
            num_logits=num_logits,
            max_query_len=description.max_query_len,
            max_seq_len=description.max_seq_len,
        )

    def views(
        self, *, num_rows: int, num_tokens: int, num_logits: int, max_query_len: int, max_seq_len: int
    ) -> ModelInput:
        """Return views of the first rows and tokens of the tensors."""
        tensors = self._tensors
        return ModelInput(
            token_ids=tensors.token_ids[:num_tokens],
            positions=tensors.positions[:num_tokens],
            slot_mapping=tensors.slot_mapping[:, :num_tokens],
            query_start_loc=tensors.query_start_loc[: num_rows + 1],
            seq_lens=tensors.seq_lens[:num_rows],
            block_tables=tensors.block_tables[:, :num_rows],
            logits_indices=tensors.logits_indices[:num_logits],
            max_query_len=max_query_len,
            max_seq_len=max_seq_len,
            lowered=tensors.lowered[:num_tokens] if self._last_drafts is not None else None,
            state_blocks=None if self._state_blocks is None else self._state_blocks[:num_rows],
            drafted_rows=self._drafted_rows(num_rows),
            max_joined=self._bounds.max_joined,
        )

    def _drafted_rows(self, num_rows: int) -> DraftedRows | None:
        if self._tensors.drafted_states is None:
            return None
        starts, pending, kept = self._tensors.drafted_states
        return DraftedRows(starts[: num_rows + 1], DraftedStates(pending[:num_rows], kept[:num_rows]))

    def fill_with_padding(self, size: int) -> None:
        """Fill in `size` sequences of length 0, on which a graph is warmed up and captured."""
        pinned = self._pinned[0]
        unpack_inputs(pinned.write(EMPTY), self._sampled_token_ids, self._tensors, size, self._bounds.block_size)
        self._copy_state_blocks(pinned)
        pinned.enqueued()

    def _copy_state_blocks(self, pinned: "_PinnedDescription") -> None:
        if self._state_blocks is not None:
            pinned.copy_state_blocks(self._state_blocks)

    def keep_samples(self, token_ids: Tensor) -> None:
        self._sampled_token_ids = token_ids


class _PinnedDescription:
    """One step in host memory: tensors for the kernel, and numpy views of the same memory for the host."""

    def __init__(
        self, max_num_seqs: int, max_num_tokens: int, max_num_blocks: int, device: torch.device, *, knows_drafts: bool
    ) -> None:
        on_cuda = device.type == "cuda"

        def pinned(size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.int32, pin_memory=on_cuda)

        self._query_start_loc = pinned(max_num_seqs + 1)
        self._seq_lens = pinned(max_num_seqs)
        self._feedback = pinned(max_num_seqs)
        self._token_ids = pinned(max_num_tokens)
        self._logits_indices = pinned(max_num_seqs)
        self._tables = pinned(max_num_seqs * max_num_blocks)
        self._state_blocks = pinned(max_num_seqs)
        self._drafted_states = pinned(3 * max_num_seqs).view(3, -1) if knows_drafts else None
        self._read = torch.cuda.Event() if on_cuda else None

    def write(self, description: StepDescription) -> DescribedBatch:
        """Copy a step to the pinned memory, after the kernel has read its previous content."""
        if self._read is not None:
            self._read.synchronize()
        for pinned, values in (
            (self._query_start_loc, description.query_start_loc),
            (self._seq_lens, description.seq_lens),
            (self._feedback, description.feedback),
            (self._token_ids, description.token_ids),
            (self._logits_indices, description.logits_indices),
            (self._tables, description.block_tables.ravel()),
        ):
            pinned.numpy()[: len(values)] = values
        states = self._state_blocks.numpy()
        states[: len(description.state_blocks)] = description.state_blocks
        states[len(description.state_blocks) :] = 0  # rows of padding
        if self._drafted_states is not None:
            self._drafted_states.numpy()[:, : description.num_sequences] = description.drafted_states
        return DescribedBatch(
            self._query_start_loc,
            self._seq_lens,
            self._feedback,
            self._token_ids,
            self._tables,
            self._logits_indices,
            num_sequences=description.num_sequences,
            num_tokens=description.num_tokens,
            num_logits=description.num_logits,
            row_stride=description.block_tables.shape[2],
            drafted_states=self._drafted_states,
        )

    def copy_state_blocks(self, target: Tensor) -> None:
        """Enqueue a copy of the blocks of recurrent states to `target`."""
        target.copy_(self._state_blocks, non_blocking=True)

    def enqueued(self) -> None:
        """Record that the kernel that reads this memory was enqueued in the current stream."""
        if self._read is not None:
            self._read.record()
