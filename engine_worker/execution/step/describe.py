"""Convert a ScheduledBatch to a StepDescription: the only place of execution that reads tokens and blocks of sequences.

Block tables are kept as numpy rows between steps, because a decode adds a block only every block_size steps. A token
in flight is represented by its index among the samples of the previous step.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from engine_worker.execution.step.draft_description import DraftDescription
from engine_worker.execution.step.step_description import Int32Array, StepDescription, feedback_of_draft
from engine_worker.kv.sequence_kv import Table
from engine_worker.scheduling.batch import ScheduledBatch, ScheduledSequence


@dataclass(frozen=True, slots=True)
class Lookahead:
    """Tokens after those of a step, whose blocks a maker of drafts also needs."""

    num_tokens: int
    max_model_len: int

    def ends(self, seq_lens: Int32Array) -> Int32Array:
        """Return [S], the ends of the tokens whose blocks are needed."""
        ends: Int32Array = np.maximum(seq_lens, np.minimum(seq_lens + self.num_tokens, self.max_model_len))
        return ends


NO_LOOKAHEAD = Lookahead(0, 0)


@dataclass(frozen=True, slots=True)
class _Described:
    entries: list[ScheduledSequence]  # one for each sample
    rows: list[ScheduledSequence]  # those with tokens, in the order of the step


class StepDescriber:
    def __init__(
        self,
        block_size: int,
        num_groups: int = 1,
        *,
        decodes_first: bool,
        has_states: bool = False,
        num_drafts: int = 0,
        lookahead: Lookahead = NO_LOOKAHEAD,
    ) -> None:
        """Choose the order of rows; a sequence has `num_groups` block tables, and a recurrent state if `has_states`.

        With `decodes_first` the order is that of the CPU's attention: decodes by ascending length, then prefills.
        Otherwise it is the order of the batch. Logits are always in the order of the batch. With states, a token and
        its drafts, at most `num_drafts`, stay together.
        """
        self._decodes_first = decodes_first
        self._has_states, self._knows_drafts = has_states, has_states and num_drafts > 0
        self._tables = BlockTableRows(block_size, num_groups, lookahead)
        self._lookahead = lookahead
        self._sample_of: dict[object, int] = {}
        self._drafting_of: dict[object, int] = {}
        self._last, self._number = _Described([], []), 0

    def describe(self, batch: ScheduledBatch) -> StepDescription:
        entries = _one_sample_each(batch.sequences)
        rows = self._in_order(entries)
        self._last, self._number = _Described(entries, rows), self._number + 1
        query_lens = np.array([scheduled.num_new_tokens for scheduled in rows], dtype=np.int32)
        query_start_loc = np.zeros(len(rows) + 1, dtype=np.int32)
        np.cumsum(query_lens, dtype=np.int32, out=query_start_loc[1:])
        seq_lens = np.array([scheduled.end for scheduled in rows], dtype=np.int32)
        token_ids, feedback = self._token_ids(rows)
        return StepDescription(
            query_start_loc=query_start_loc,
            seq_lens=seq_lens,
            feedback=np.array(feedback, dtype=np.int32),
            token_ids=np.array(token_ids, dtype=np.int32),
            logits_indices=self._logits_indices(entries, rows, query_start_loc),
            block_tables=self._tables.of(rows, seq_lens),
            state_blocks=np.array(
                [scheduled.sequence.kv.state_block for scheduled in rows] if self._has_states else [], dtype=np.int32
            ),
            drafted_states=describe_states(rows) if self._knows_drafts else np.zeros((3, 0), dtype=np.int32),
            max_query_len=int(query_lens.max(initial=0)),
            max_seq_len=int(seq_lens.max(initial=0)),
            transfers=batch.transfers,
        )

    def describe_drafts(self, batch: ScheduledBatch) -> DraftDescription:
        """Return what a maker of drafts must know of the last described step, whose batch is `batch`."""
        entries, rows = self._last.entries, self._last.rows
        row_of = {id(entry): row for row, entry in enumerate(rows)}
        following, number = np.zeros(len(rows), dtype=np.int32), 0
        for entry in entries:
            if (row := row_of.get(id(entry))) is not None:
                following[row] = -1 - number if entry.samples else _token_after(entry)
            number += entry.samples
        drafting, firsts, lasts, last_rows, number, end = [], [], [], [], 0, 0
        for scheduled in batch.sequences:
            end += 1 + len(scheduled.drafts)
            if not scheduled.samples:
                continue
            if scheduled.num_new_tokens:  # not a fork, whose blocks are not in this step
                drafting.append(scheduled.sequence)
                firsts.append(number)
                lasts.append(number + len(scheduled.drafts))
                last_rows.append(row_of[id(entries[end - 1])])
            number += 1 + len(scheduled.drafts)
        self._drafting_of = {sequence: place for place, sequence in enumerate(drafting)}
        longest = np.array([max((entry.end for entry in rows), default=0)], dtype=np.int32)
        return DraftDescription(
            following=following,
            first_samples=np.array(firsts, dtype=np.int32),
            last_samples=np.array(lasts, dtype=np.int32),
            table_rows=np.array(last_rows, dtype=np.int32),
            drafting=drafting,
            max_seq_len=int(self._lookahead.ends(longest)[0]),
            step=self._number,
        )

    def without_drafts(self) -> None:
        """Record that the last described step neither checks nor makes drafts: its tokens in flight are its samples."""
        self._drafting_of = {}

    def rows_of(self, batch: ScheduledBatch) -> list[ScheduledSequence]:
        """Return the scheduled sequences that have tokens, in the order of their rows in the step.

        A sequence with drafts has a row for each token, like as many sequences that decode and share their blocks. So
        its logits have the bits of steps without drafts.
        """
        return self._in_order(_one_sample_each(batch.sequences))

    def _in_order(self, entries: list[ScheduledSequence]) -> list[ScheduledSequence]:
        rows = [scheduled for scheduled in entries if scheduled.num_new_tokens]
        if not self._decodes_first:
            return rows
        together = self._knows_drafts and any(scheduled.drafts for scheduled in rows)
        return sorted(rows, key=_has_several_tokens if together else _decodes_first)

    def keep_samples(self, sequences: Iterable[object]) -> None:
        """Record that sample i of the last described step is the token in flight of `sequences[i]`."""
        self._sample_of = {sequence: index for index, sequence in enumerate(sequences)}

    def _logits_indices(
        self, entries: list[ScheduledSequence], rows: list[ScheduledSequence], query_start_loc: Int32Array
    ) -> Int32Array:
        """Return the rows of logits. A fork without tokens has no row and uses the previous sequence's logits."""
        if not self._decodes_first:
            ends = np.cumsum([scheduled.num_new_tokens for scheduled in entries], dtype=np.int32)
            wanted = np.array([row for row, scheduled in enumerate(entries) if scheduled.samples], np.intp)
            return ends[wanted] - 1
        ends_by_row = zip(rows, query_start_loc[1:].tolist(), strict=True)
        last_row, row = {id(scheduled): end - 1 for scheduled, end in ends_by_row}, -1
        indices = []
        for scheduled in entries:
            row = last_row.get(id(scheduled), row)
            if scheduled.samples:
                indices.append(row)
        return np.array(indices, dtype=np.int32)

    def _token_ids(self, rows: list[ScheduledSequence]) -> tuple[list[int], list[int]]:
        """Return all token ids, 0 for one in flight, and for each row its feedback; see StepDescription."""
        token_ids: list[int] = []
        feedback = []
        for scheduled in rows:
            sequence, end = scheduled.sequence, scheduled.end
            if scheduled.has_unknown_drafts:
                token_ids.append(0)
                feedback.append(feedback_of_draft(self._drafting_of[sequence], -scheduled.drafts[0]))
            elif scheduled.drafts:
                token_ids += scheduled.drafts
                feedback.append(-1)
            elif end > sequence.num_known_tokens:
                assert scheduled.num_new_tokens == 1, "a token in flight is the only one of its row"
                token_ids.append(0)
                drafting = self._drafting_of.get(sequence)
                feedback.append(self._sample_of[sequence] if drafting is None else feedback_of_draft(drafting, 0))
            else:
                token_ids += sequence.token_ids(scheduled.start, end)
                feedback.append(-1)
        return token_ids, feedback


def _token_after(scheduled: ScheduledSequence) -> int:
    """Return the token after those of a step that does not sample; 0 if it is not known."""
    sequence, end = scheduled.sequence, scheduled.end
    return sequence.token_ids(end, end + 1)[0] if end < sequence.num_known_tokens else 0


def _one_sample_each(batch: list[ScheduledSequence]) -> list[ScheduledSequence]:
    """Return an entry for each sample: the drafts of a sequence become entries of one token, which is the draft."""
    if not any(scheduled.drafts for scheduled in batch):
        return batch
    entries: list[ScheduledSequence] = []
    for scheduled in batch:
        if not scheduled.drafts:
            entries.append(scheduled)
            continue
        sequence, first = scheduled.sequence, scheduled.end - len(scheduled.drafts)
        before = first - scheduled.start
        entries.append(ScheduledSequence(sequence, scheduled.start, before, True, num_pending=scheduled.num_pending))
        for position, draft in enumerate(scheduled.drafts, first):
            entries.append(ScheduledSequence(sequence, position, 1, True, (draft,), scheduled.num_pending))
    return entries


def describe_states(rows: list[ScheduledSequence]) -> Int32Array:
    """Return [3, S]: for each row, the end of its tokens as a recurrent layer counts them, `pending`, and `kept`.

    The tokens of a sequence and of its drafts belong to its last row there, and its other rows have none. `pending` and
    `kept` are those of kernels.recurrent.batch.DraftedStates.
    """
    described, start, end = np.zeros((3, len(rows)), dtype=np.int32), 0, 0
    for row, scheduled in enumerate(rows):
        end += scheduled.num_new_tokens
        if row + 1 < len(rows) and rows[row + 1].sequence is scheduled.sequence:
            described[0, row] = start
            continue
        pending = scheduled.num_pending
        described[:, row] = end, pending, pending if scheduled.drafts else pending + end - start
        start = end
    return described


def _has_several_tokens(scheduled: ScheduledSequence) -> bool:
    return scheduled.num_new_tokens > 1


def _decodes_first(scheduled: ScheduledSequence) -> tuple[bool, int]:
    return scheduled.num_new_tokens > 1, scheduled.end


@dataclass(slots=True)
class _TableRow:
    source: tuple[Table, ...]  # the tables this row was read from: a sequence that is admitted again has other ones
    num_preemptions: int
    num_changes: int
    block_ids: Int32Array  # [G, capacity]; the first num_blocks of a group are valid
    num_blocks: int


class BlockTableRows:
    """The block tables of the last batch as arrays, so that only changes are converted."""

    def __init__(self, block_size: int, num_groups: int = 1, lookahead: Lookahead = NO_LOOKAHEAD) -> None:
        self._block_size, self._lookahead = block_size, lookahead
        self._num_groups = num_groups
        self._rows: dict[object, _TableRow] = {}

    def of(self, rows: list[ScheduledSequence], seq_lens: Int32Array) -> Int32Array:
        """Return [G, S, B], the blocks that hold tokens after this step. A table may already have more for the next."""
        used = (-(-self._lookahead.ends(seq_lens) // self._block_size)).tolist()
        tables = np.zeros((self._num_groups, len(rows), max(used, default=0)), dtype=np.int32)
        table_rows: dict[object, _TableRow] = {}
        for index, (scheduled, num_blocks) in enumerate(zip(rows, used, strict=True)):
            row = table_rows.get(scheduled.sequence)  # a sequence with drafts has several rows
            if row is None:
                row = table_rows[scheduled.sequence] = self._row(scheduled)
            held = min(num_blocks, row.num_blocks)
            tables[:, index, :held] = row.block_ids[:, :held]
        self._rows = table_rows
        return tables

    def _row(self, scheduled: ScheduledSequence) -> _TableRow:
        sequence = scheduled.sequence
        kv, row = sequence.kv, self._rows.get(sequence)
        if row is None or row.source is not kv.tables or row.num_preemptions != sequence.num_preemptions:
            blank: Int32Array = np.zeros((self._num_groups, 0), dtype=np.int32)
            row = _TableRow(kv.tables, sequence.num_preemptions, -1, blank, 0)
        if row.num_changes != kv.num_changes:
            self._follow(row, kv.tables, scheduled.start // self._block_size)
            row.num_changes = kv.num_changes
        return row

    def _follow(self, row: _TableRow, tables: tuple[Table, ...], first: int) -> None:
        """Read the blocks that were added, and those that are written to, which copy-on-write may have replaced."""
        first, num_blocks = min(first, row.num_blocks), max(len(table.blocks) for table in tables)
        if num_blocks > row.block_ids.shape[1]:
            capacity = num_blocks + (row.num_blocks and num_blocks)  # twice as many if it grows
            grown: Int32Array = np.zeros((self._num_groups, capacity), dtype=np.int32)
            grown[:, : row.num_blocks] = row.block_ids[:, : row.num_blocks]
            row.block_ids = grown
        for block_ids, table in zip(row.block_ids, tables, strict=True):
            block_ids[first : len(table.blocks)] = table.blocks[first:]
        row.num_blocks = num_blocks
