"""Draft what followed the last tokens of a sequence earlier in it, by a search on the device after each step.

The device keeps the tokens of sequences in a table. Those of steps that it drafts in are written there by the device,
and all others by the host, which knows them. So a step that neither checks nor makes drafts costs nothing.
"""

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine_worker.execution.sampling.sampling_pieces import to_device
from engine_worker.execution.step.cuda_graphs import GraphKey
from engine_worker.execution.step.describe import Lookahead
from engine_worker.execution.step.draft_description import DraftDescription
from engine_worker.execution.step.draft_maker import DraftBounds, SampledSteps
from engine_worker.execution.step.step_description import Int32Array
from engine_worker.model.model_input import ModelInput
from engine_worker.model.tensor_parallel import TensorParallel
from engine_worker.scheduling.batch import Sequence
from kernels.draft_inputs import begin_drafts
from kernels.draft_inputs_reference import LastDrafts
from kernels.ngram_drafts import ngram_drafts, record_tokens
from kernels.ngram_drafts_reference import NgramLengths, TokenTable


@dataclass(slots=True)
class _Row:
    number: int
    num_tokens: int = 0  # that were known when its tokens were last complete on the device
    step: int = -1  # the last one in which it drafted


class TokenRows:
    """Rows of the table, by sequence. The one that drafted longest ago gives its row to a new one."""

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self._rows: OrderedDict[Sequence, _Row] = OrderedDict()

    def of(self, drafting: list[Sequence], step: int) -> tuple[Int32Array, dict[int, tuple[int, list[int]]]]:
        """Return the row of each sequence, and for some rows the position of the first missing token, and the tokens.

        The device itself completes a sequence that also drafted in the step before. `step`: its number.
        """
        for sequence in drafting:
            if sequence in self._rows:
                self._rows.move_to_end(sequence)
        missing = {}
        for sequence in drafting:
            row = self._rows.get(sequence) or self._taken(sequence)
            known = sequence.num_known_tokens
            if row.step != step - 1 or not row.num_tokens:
                missing[row.number] = row.num_tokens, sequence.token_ids(row.num_tokens, known)
            row.num_tokens, row.step = known, step
        return np.array([self._rows[sequence].number for sequence in drafting], dtype=np.int32), missing

    def _taken(self, sequence: Sequence) -> _Row:
        number = len(self._rows)
        if number == self._num_rows:
            _, row = self._rows.popitem(last=False)
            number = row.number
        self._rows[sequence] = row = _Row(number)
        return row


class NgramDrafts:
    """Implements DraftMaker."""

    follows_all_steps = False

    def __init__(self, lengths: NgramLengths, bounds: DraftBounds, last: LastDrafts, ranks: TensorParallel) -> None:
        """Allocate the table. `last`: what the inputs of the next step read."""
        device = last.drafts.device
        self._lengths, self.last, self._ranks = lengths, last, ranks
        self._sampled = SampledSteps(bounds.max_rows, device)
        self._rows = TokenRows(bounds.max_rows)
        num_rows = bounds.max_rows if ranks.rank == 0 else 0
        self._table = torch.zeros(num_rows, bounds.max_model_len, dtype=torch.int32, device=device)
        self.lookahead = Lookahead(last.lookahead, bounds.max_model_len)

    @torch.inference_mode()
    def launch(
        self, model_input: ModelInput, key: GraphKey | None, sampled: Tensor, description: DraftDescription, number: int
    ) -> Tensor | None:
        """Enqueue the search after a step; see DraftMaker."""
        count = description.num_drafting
        rows, missing = self._rows.of(description.drafting, description.step)
        self._write(missing)
        self._sampled.write(description, rows, sampled)
        step = self._sampled.step(model_input, count)
        begin_drafts(step, self.last)
        drafts = self.last.drafts[:number, :count]
        if count and self._ranks.rank == 0:
            table = TokenTable(self._table, self._sampled.described[3, :count])
            record_tokens(step, self.last, table)
            ngram_drafts(self.last, table, self._lengths, drafts)
        if not drafts.numel():
            return None
        if self._ranks.size > 1:  # the other ranks know no tokens, but those of the step
            drafts.copy_(self._ranks.broadcast(drafts.contiguous()))
        return drafts

    def _write(self, missing: dict[int, tuple[int, list[int]]]) -> None:
        """Enqueue a copy of tokens that the device does not have."""
        if not missing:
            return
        max_len = self._table.shape[1]
        places = [np.arange(first, first + len(ids)) + row * max_len for row, (first, ids) in missing.items()]
        written = np.stack([np.concatenate(places), np.concatenate([ids for _, ids in missing.values()])])
        where, token_ids = to_device(written.astype(np.int64), self._table.device)
        self._table.view(-1)[where] = token_ids.to(torch.int32)
