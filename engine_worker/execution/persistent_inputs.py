"""The inputs of a step on CUDA: described in pinned memory by numpy, unpacked by one kernel into tensors that stay.

CUDA graphs read these tensors at fixed addresses; steps that are no graph get views of them. The kernel runs in stream
order, after the step before has read its inputs. A token that is still in flight comes from what that step sampled.

The host writes a step's description while the one before runs, so there are several in turn; an event says when one
was read. Block tables are kept as numpy rows between the steps: a decode adds a block every block_size steps.

Between the scheduler and the forward pass, in every step of a worker on CUDA: the model runner hands a ScheduledBatch
in, and the model reads what lies here. It knows nothing of why a sequence is in the step, of weights or of sampling.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine_worker.model.model_input import ModelInput
from engine_worker.scheduling.batch import ScheduledBatch, ScheduledSequence
from engine_worker.scheduling.sequence import Sequence
from kernels.unpack_inputs import DescribedBatch, InputTensors, unpack_inputs

Int32Array = NDArray[np.int32]

NUM_DESCRIPTIONS = 3  # one is being written, one may wait on the device, one is spare for a step without sequences


class PersistentInputs:
    def __init__(
        self, max_num_seqs: int, max_num_tokens: int, max_model_len: int, block_size: int, device: torch.device
    ) -> None:
        """`max_num_seqs` rows and `max_num_tokens` tokens at most in a step, padding included."""
        max_num_blocks = -(-max_model_len // block_size)
        self._block_size = block_size
        self._descriptions = [
            _Description(max_num_seqs, max_num_tokens, max_num_blocks, device) for _ in range(NUM_DESCRIPTIONS)
        ]
        self._tensors = InputTensors(
            token_ids=torch.zeros(max_num_tokens, dtype=torch.int64, device=device),
            positions=torch.zeros(max_num_tokens, dtype=torch.int64, device=device),
            slot_mapping=torch.zeros(max_num_tokens, dtype=torch.int64, device=device),
            query_start_loc=torch.zeros(max_num_seqs + 1, dtype=torch.int32, device=device),
            seq_lens=torch.zeros(max_num_seqs, dtype=torch.int32, device=device),
            block_tables=torch.zeros((max_num_seqs, max_num_blocks), dtype=torch.int32, device=device),
            logits_indices=torch.zeros(max_num_seqs, dtype=torch.int64, device=device),
        )
        self._tables = BlockTableRows(block_size)
        self._sampled_token_ids = torch.zeros(1, dtype=torch.int64, device=device)
        self._sampled_index: dict[Sequence, int] = {}

    def fill(self, batch: ScheduledBatch, size: int | None = None) -> ModelInput:
        """Enqueue the unpacking of `batch`, padded to `size` rows and tokens; nothing waits for the device.

        The tensors are overwritten by the next call's kernel.
        """
        sequences = batch.sequences
        description = self._descriptions[0]
        self._descriptions = [*self._descriptions[1:], description]
        described = description.describe(sequences, self._sampled_index, self._tables, self._block_size)
        unpack_inputs(described, self._sampled_token_ids, self._tensors, size, self._block_size)
        description.enqueued()
        return self.views(
            num_rows=size or described.num_sequences,
            num_tokens=size or described.num_tokens,
            num_logits=described.num_logits,
            max_query_len=max(scheduled.num_new_tokens for scheduled in sequences),
            max_seq_len=max(scheduled.end for scheduled in sequences),
        )

    def rows_of(self, batch: ScheduledBatch) -> list[ScheduledSequence]:
        """The scheduled sequences with tokens, in the order in which their tokens stand in the network's input."""
        return [scheduled for scheduled in batch.sequences if scheduled.num_new_tokens]

    def views(
        self, *, num_rows: int, num_tokens: int, num_logits: int, max_query_len: int, max_seq_len: int
    ) -> ModelInput:
        """The first rows and tokens of the tensors, whatever they hold."""
        tensors = self._tensors
        return ModelInput(
            token_ids=tensors.token_ids[:num_tokens],
            positions=tensors.positions[:num_tokens],
            slot_mapping=tensors.slot_mapping[:num_tokens],
            query_start_loc=tensors.query_start_loc[: num_rows + 1],
            seq_lens=tensors.seq_lens[:num_rows],
            block_tables=tensors.block_tables[:num_rows],
            logits_indices=tensors.logits_indices[:num_logits],
            max_query_len=max_query_len,
            max_seq_len=max_seq_len,
        )

    def fill_with_padding(self, size: int) -> None:
        """Fill in `size` sequences of length 0, on which a graph is warmed up and captured."""
        described = self._descriptions[0].describe([], {}, self._tables, self._block_size)
        unpack_inputs(described, self._sampled_token_ids, self._tensors, size, self._block_size)
        self._descriptions[0].enqueued()

    def keep_samples(self, sequences: list[Sequence], token_ids: Tensor) -> None:
        """`token_ids[i]` (int64, on the device) is the token in flight of `sequences[i]` when the next step begins."""
        self._sampled_index = {sequence: index for index, sequence in enumerate(sequences)}
        self._sampled_token_ids = token_ids


class _Description:
    """One step in host memory: tensors for the kernel, and numpy views of the same memory for the host."""

    def __init__(self, max_num_seqs: int, max_num_tokens: int, max_num_blocks: int, device: torch.device) -> None:
        on_cuda = device.type == "cuda"

        def pinned(size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.int32, pin_memory=on_cuda)

        self._query_start_loc = pinned(max_num_seqs + 1)
        self._seq_lens = pinned(max_num_seqs)
        self._feedback = pinned(max_num_seqs)
        self._token_ids = pinned(max_num_tokens)
        self._logits_indices = pinned(max_num_seqs)
        self._tables = pinned(max_num_seqs * max_num_blocks)
        self._token_array: Int32Array = self._token_ids.numpy()
        self._table_array: Int32Array = self._tables.numpy()
        self._read = torch.cuda.Event() if on_cuda else None

    def describe(
        self,
        sequences: list[ScheduledSequence],
        sampled_index: dict[Sequence, int],
        tables: "BlockTableRows",
        block_size: int,
    ) -> DescribedBatch:
        if self._read is not None:
            self._read.synchronize()
        all_ends = np.cumsum([scheduled.num_new_tokens for scheduled in sequences], dtype=np.int32)
        wanted = np.array([row for row, scheduled in enumerate(sequences) if scheduled.samples], dtype=np.intp)
        # A fork without tokens ends where the sequence before it does, and so wants the same logits; it is no row.
        self._logits_indices.numpy()[: len(wanted)] = all_ends[wanted] - 1
        sequences = [scheduled for scheduled in sequences if scheduled.num_new_tokens]
        num_sequences = len(sequences)
        token_ids, feedback = _token_ids(sequences, sampled_index)
        query_start_loc = self._query_start_loc.numpy()
        query_start_loc[0] = 0
        ends = query_start_loc[1 : num_sequences + 1]
        np.cumsum([scheduled.num_new_tokens for scheduled in sequences], dtype=np.int32, out=ends)
        self._seq_lens.numpy()[:num_sequences] = [scheduled.end for scheduled in sequences]
        self._feedback.numpy()[:num_sequences] = feedback
        self._token_array[: len(token_ids)] = token_ids
        row_stride = tables.write(sequences, self._table_array)
        return DescribedBatch(
            self._query_start_loc,
            self._seq_lens,
            self._feedback,
            self._token_ids,
            self._tables,
            self._logits_indices,
            num_sequences=num_sequences,
            num_tokens=len(token_ids),
            num_logits=len(wanted),
            row_stride=row_stride,
        )

    def enqueued(self) -> None:
        """The kernel that reads it is in the current stream."""
        if self._read is not None:
            self._read.record()


def _token_ids(sequences: list[ScheduledSequence], sampled_index: dict[Sequence, int]) -> tuple[list[int], list[int]]:
    """All token ids, 0 for one in flight; and for each sequence where that is among the samples, or -1."""
    token_ids: list[int] = []
    feedback = []
    for scheduled in sequences:
        sequence, end = scheduled.sequence, scheduled.end
        if end > sequence.num_known_tokens:
            assert scheduled.num_new_tokens == 1, "a token in flight is the only one of its row"
            token_ids.append(0)
            feedback.append(sampled_index[sequence])
        else:
            token_ids += sequence.token_ids(scheduled.start, end)
            feedback.append(-1)
    return token_ids, feedback


@dataclass(slots=True)
class _TableRow:
    source: list[int]  # the table this row was read from: a sequence that comes back has another one
    num_preemptions: int
    block_ids: Int32Array  # as long as the table's capacity; the first num_blocks are right
    num_blocks: int = 0


class BlockTableRows:
    """The block tables of the last batch as arrays, so that only what has changed is converted."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._rows: dict[Sequence, _TableRow] = {}

    def write(self, sequences: list[ScheduledSequence], out: Int32Array) -> int:
        """The used blocks of each table, one row after another in `out`; returns the length of a row."""
        if not sequences:
            self._rows = {}
            return 0
        block_size = self._block_size
        rows = {scheduled.sequence: self._row(scheduled) for scheduled in sequences}
        row_stride = max(row.num_blocks for row in rows.values())
        tables = out[: len(sequences) * row_stride].reshape(len(sequences), row_stride)
        for index, scheduled in enumerate(sequences):
            row = rows[scheduled.sequence]
            used = -(-scheduled.end // block_size)
            tables[index, :used] = row.block_ids[:used]
        self._rows = rows
        return row_stride

    def _row(self, scheduled: ScheduledSequence) -> _TableRow:
        sequence = scheduled.sequence
        table = sequence.block_table
        row = self._rows.get(sequence)
        if row is None or row.source is not table or row.num_preemptions != sequence.num_preemptions:
            row = _TableRow(table, sequence.num_preemptions, np.array(table, dtype=np.int32))
        else:
            # Blocks that are written to may have been replaced (copy-on-write); what is computed before them stays.
            first = min(scheduled.start // self._block_size, row.num_blocks)
            if len(table) > len(row.block_ids):
                row.block_ids = np.concatenate((row.block_ids, np.zeros(len(table), dtype=np.int32)))
            row.block_ids[first : len(table)] = table[first:]
        row.num_blocks = len(table)
        return row
