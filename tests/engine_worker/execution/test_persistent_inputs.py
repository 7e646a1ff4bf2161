"""Model inputs of CUDA and CPU equal the reference, also when block tables change between steps.

PersistentInputs, the CUDA variant, runs on a CPU here, with the reference implementation of its kernel.
"""

import dataclasses
import random
from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from engine_worker.execution.step.describe import StepDescriber
from engine_worker.execution.step.input_builder import HostInputs
from engine_worker.execution.step.persistent_inputs import InputBounds, PersistentInputs
from engine_worker.execution.step.step_description import EMPTY, StepDescription
from engine_worker.kv.sequence import Sequence
from engine_worker.kv.sequence_kv import Table
from engine_worker.kv.transfers import BlockCopy, Moves, Transfers
from engine_worker.model.model_input import ModelInput
from engine_worker.scheduling.batch import ScheduledBatch, ScheduledSequence
from tests.builders import make_sequence
from tests.engine_worker.execution.reference_inputs import reference_model_input

CPU = torch.device("cpu")
BLOCK_SIZE = 4


class Inputs:
    """The inputs of CUDA and of the CPU, each with its own describer. Descriptions are serialized."""

    def __init__(self, max_rows: int = 8, max_tokens: int = 64) -> None:
        bounds = InputBounds(
            max_rows=max_rows, max_tokens=max_tokens, max_model_len=64, block_size=BLOCK_SIZE, num_groups=2
        )
        self.persistent = PersistentInputs(bounds, CPU)
        self._describer = StepDescriber(BLOCK_SIZE, 2, decodes_first=False)
        self._host, self._host_describer = HostInputs(BLOCK_SIZE), StepDescriber(BLOCK_SIZE, 2, decodes_first=True)

    def fill(self, batch: ScheduledBatch, size: int | None = None) -> ModelInput:
        sent = self._describer.describe(batch).to_bytes()
        return self.persistent.unpack(StepDescription.from_bytes(sent), size)

    def fill_on_cpu(self, batch: ScheduledBatch) -> ModelInput:
        sent = self._host_describer.describe(batch).to_bytes()
        return self._host.unpack(StepDescription.from_bytes(sent))

    def keep_samples(self, sequences: list[Sequence], token_ids: torch.Tensor) -> None:
        for describer in (self._describer, self._host_describer):
            describer.keep_samples(sequences)
        for inputs in (self.persistent, self._host):
            inputs.keep_samples(token_ids)


def sequence(num_tokens: int, *block_table: int) -> Sequence:
    made = make_sequence(num_tokens)
    made.kv.tables = tables_of(block_table)
    return made


def tables_of(block_ids: Iterable[int]) -> tuple[Table, Table]:
    """Return the tables of two groups."""
    first = list(block_ids)
    return Table(first), Table([50 + block_id for block_id in first])


def decode(of: Sequence) -> ScheduledSequence:
    return ScheduledSequence(of, of.num_tokens - 1, 1, samples=True)


def assert_inputs(actual: ModelInput, expected: ModelInput) -> None:
    """Compare all fields; the block tables of `expected` are only as wide as the longest sequence."""
    for field in dataclasses.fields(ModelInput):
        ours, theirs = getattr(actual, field.name), getattr(expected, field.name)
        if field.name == "block_tables":
            for row, seq_len in enumerate(expected.seq_lens.tolist()):
                used = -(-seq_len // BLOCK_SIZE)
                assert torch.equal(ours[:, row, :used], theirs[:, row, :used])
        elif field.name == "logits_indices":
            assert torch.equal(ours[: len(theirs)], theirs) and not ours[len(theirs) :].any()
        elif isinstance(ours, torch.Tensor):
            assert ours.dtype == theirs.dtype and torch.equal(ours, theirs), field.name
        else:
            assert ours == theirs, field.name


def assert_as_built(inputs: Inputs, scheduled: list[ScheduledSequence], **inflight: dict[Sequence, int]) -> None:
    batch = ScheduledBatch(scheduled)
    expected = reference_model_input(batch, BLOCK_SIZE, **inflight)
    assert_inputs(inputs.fill(batch), expected)
    assert_inputs(inputs.fill_on_cpu(batch), expected)


def test_inputs_random_batches_equal_reference() -> None:
    """Batches use the CPU's row order: decodes by length, then chunks by length."""
    source = random.Random(0)
    inputs = Inputs(max_tokens=200)
    sequences = [sequence(source.randint(1, 30), *source.sample(range(1, 999), 16)) for _ in range(12)]
    for _ in range(50):
        chosen = source.sample(sequences, source.randint(1, 8))
        scheduled = [decode(one) for one in chosen[::2]]
        for one in chosen[1::2]:
            start = source.randrange(one.num_tokens)
            new = source.randint(1, one.num_tokens - start)
            scheduled.append(ScheduledSequence(one, start, new, samples=source.random() < 0.5))
        scheduled.sort(key=lambda item: (item.num_new_tokens > 1, item.end))
        assert_as_built(inputs, scheduled)


def test_inputs_token_in_flight_comes_from_previous_samples() -> None:
    inputs = Inputs()
    first, second, third = sequence(3, 1), sequence(5, 2, 3), sequence(2, 4)
    inputs.fill(ScheduledBatch([decode(first), decode(second)]))
    inputs.keep_samples([first, second], torch.tensor([111, 222]))
    for one in (first, second):
        one.num_inflight_tokens = 1
    scheduled = [decode(third), decode(second)]
    assert_as_built(inputs, scheduled, inflight_token_ids={second: 222})


def test_inputs_of_recurrent_layers_have_a_sequence_and_its_drafts_in_one_row() -> None:
    bounds = InputBounds(max_rows=9, max_tokens=32, max_model_len=64, block_size=BLOCK_SIZE, num_groups=2, max_joined=4)
    persistent, drafted, plain = PersistentInputs(bounds, CPU, has_states=True), sequence(9, 1, 2, 3), sequence(30, 4)
    batch = ScheduledBatch(
        [
            ScheduledSequence(plain, 28, 2, samples=True, num_pending=3),
            ScheduledSequence(drafted, 8, 3, samples=True, drafts=(7, 8), num_pending=1),
        ]
    )
    plain.kv.tables, drafted.kv.tables = tables_of(range(4, 14)), tables_of((1, 2, 3))
    plain.kv.state_block, drafted.kv.state_block = 5, 6
    options: dict[str, Any] = {"has_states": True, "num_drafts": 3}
    described = StepDescriber(BLOCK_SIZE, 2, decodes_first=False, **options).describe(batch)
    found = persistent.unpack(StepDescription.from_bytes(described.to_bytes()), 8).drafted_rows
    assert found is not None
    # The row of the other sequence, two rows of no tokens, three tokens, and padding until the tokens are used up.
    assert found.query_start_loc.tolist() == [0, 2, 2, 2, 5, 6, 7, 8, 8]
    assert found.states.pending.tolist() == [3, 0, 0, 1, 0, 0, 0, 0]
    assert found.states.kept.tolist() == [5, 0, 0, 1, 1, 1, 1, 1]
    on_cpu = StepDescriber(BLOCK_SIZE, 2, decodes_first=True, **options).describe(batch)
    rows = HostInputs(BLOCK_SIZE, max_joined=4).unpack(on_cpu).drafted_rows
    assert rows is not None
    assert rows.query_start_loc.tolist() == [0, 0, 0, 3, 5]  # decodes come first
    assert (rows.states.pending.tolist(), rows.states.kept.tolist()) == ([0, 0, 1, 3], [0, 0, 1, 5])


def grow(one: Sequence, block_ids: Iterable[int]) -> None:
    for table, more in zip(one.kv.tables, tables_of(block_ids), strict=True):
        table.blocks += more.blocks
    one.kv.num_changes += 1


def test_inputs_block_tables_follow_growth_copy_and_readmission() -> None:
    inputs = Inputs()
    one, other = sequence(8, 1, 2), sequence(8, 3, 4)
    assert_as_built(inputs, [decode(one), decode(other)])
    one.output_token_ids.append(9)
    grow(one, [5])  # the ninth token starts a new block
    assert_as_built(inputs, [decode(other), decode(one)])
    one.kv.tables[0].blocks[2] = 6  # a shared block was copied before a write
    one.kv.num_changes += 1
    assert_as_built(inputs, [decode(other), decode(one)])
    other.kv.tables = tables_of([7, 8])  # preempted and admitted again
    assert_as_built(inputs, [decode(other), decode(one)])
    one.num_preemptions += 1  # preempted and admitted again, with its table changed in place
    one.kv.tables[0].blocks[:] = [10, 11, 12]
    assert_as_built(inputs, [decode(other), decode(one)])
    one.output_token_ids += [9] * 30
    grow(one, range(20, 40))
    assert_as_built(inputs, [decode(other), decode(one)])


def test_inputs_are_padded_to_graph_rows() -> None:
    inputs = Inputs()
    one = sequence(6, 1, 2)
    padded = inputs.fill(ScheduledBatch([decode(one)]), size=4)
    assert padded.token_ids.tolist() == [one.prompt_token_ids[5], 0, 0, 0]
    assert padded.slot_mapping[0].tolist() == [2 * BLOCK_SIZE + 1, 0, 0, 0]
    assert padded.query_start_loc.tolist() == [0, 1, 2, 3, 4]
    assert padded.seq_lens.tolist() == [6, 0, 0, 0]
    assert padded.logits_indices.tolist() == [0]
    inputs.persistent.fill_with_padding(3)
    views = inputs.persistent.views(num_rows=3, num_tokens=3, num_logits=3, max_query_len=1, max_seq_len=64)
    assert (views.seq_lens.tolist(), views.query_start_loc.tolist()) == ([0, 0, 0], [0, 1, 2, 3])


def test_inputs_chunk_is_padded_in_tokens_and_rows() -> None:
    inputs = Inputs()
    padded = inputs.fill(ScheduledBatch([ScheduledSequence(sequence(6, 1, 2), 0, 6, samples=True)]), size=8)
    assert padded.query_start_loc.tolist() == [0, 6, 7, 8, 8, 8, 8, 8, 8]
    assert padded.positions.tolist() == [0, 1, 2, 3, 4, 5, 0, 0]
    assert (padded.logits_indices.tolist(), padded.max_query_len) == ([5], 6)


def test_inputs_tensors_keep_their_address() -> None:
    inputs = Inputs()
    pointers = [inputs.fill(ScheduledBatch([decode(sequence(2, 1))])).token_ids.data_ptr() for _ in range(5)]
    assert len(set(pointers)) == 1


def test_inputs_forks_without_tokens_share_previous_logits() -> None:
    inputs = Inputs()
    first, forks, other = sequence(6, 1, 2), [sequence(6, 1, 2) for _ in range(2)], sequence(9, 3, 4, 5)
    scheduled = [
        decode(other),
        ScheduledSequence(first, 0, 6, samples=True),
        *(ScheduledSequence(fork, 6, 0, samples=True) for fork in forks),
    ]
    assert_as_built(inputs, scheduled)
    model_input = inputs.fill(ScheduledBatch(scheduled))
    assert model_input.logits_indices.tolist() == [0, 6, 6, 6]
    assert (model_input.seq_lens.tolist(), model_input.query_start_loc.tolist()) == ([9, 6], [0, 1, 7])
    inputs.keep_samples([other, first, *forks], torch.tensor([11, 12, 13, 14]))
    for one in (other, first, *forks):
        one.num_inflight_tokens = 1
    forks[1].kv.tables[0].blocks = [1, 7]  # copied from the shared block
    in_flight = dict(zip([other, first, *forks], [11, 12, 13, 14], strict=True))
    assert_as_built(inputs, [decode(one) for one in (first, *forks)], inflight_token_ids=in_flight)


def test_step_description_survives_serialization() -> None:
    one, other = sequence(6, 1, 2), sequence(9, 3, 4, 5)
    batch = ScheduledBatch(
        [decode(other), ScheduledSequence(one, 0, 6, samples=True)],
        Transfers(
            Moves([BlockCopy(3, 4), BlockCopy(5, 6)], [BlockCopy(7, 8)], [BlockCopy(1, 2)]),
            Moves(copies=[BlockCopy(0, 3)]),
            batch_number=9,
        ),
    )
    described = StepDescriber(BLOCK_SIZE, 2, decodes_first=False).describe(batch)
    received = StepDescription.from_bytes(described.to_bytes())
    for field in dataclasses.fields(StepDescription):
        ours, theirs = getattr(received, field.name), getattr(described, field.name)
        if isinstance(theirs, np.ndarray):
            assert ours.dtype == theirs.dtype == np.int32 and np.array_equal(ours, theirs), field.name
        else:
            assert ours == theirs, field.name
    assert received.transfers.batch_number == 9 and received.block_tables.shape == (2, 2, 3)
    assert StepDescription.from_bytes(EMPTY.to_bytes()).block_tables.shape == (0, 0, 0)


def test_step_description_invalid_bytes_are_refused() -> None:
    described = StepDescriber(BLOCK_SIZE, 2, decodes_first=False).describe(
        ScheduledBatch([decode(sequence(9, 3, 4, 5))])
    )
    data = described.to_bytes()
    for wrong in (b"", data[:-1], data + b"\0", b"\x90", data.replace(bytes([9, 0, 0, 0]), b"")):
        with pytest.raises((msgspec.DecodeError, ValueError)):
            StepDescription.from_bytes(wrong)
