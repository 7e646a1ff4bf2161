"""PersistentInputs on a CPU: the inputs that build_model_input makes, also when block tables change between steps."""

import dataclasses
import random

import torch

from engine_worker.execution.input_builder import build_model_input
from engine_worker.execution.persistent_inputs import PersistentInputs
from engine_worker.model.model_input import ModelInput
from engine_worker.scheduling.batch import ScheduledBatch, ScheduledSequence
from engine_worker.scheduling.sequence import Sequence
from tests.builders import make_sequence

CPU = torch.device("cpu")
BLOCK_SIZE = 4


def make_inputs(max_num_seqs: int = 8, max_num_tokens: int = 64) -> PersistentInputs:
    return PersistentInputs(max_num_seqs, max_num_tokens, max_model_len=64, block_size=BLOCK_SIZE, device=CPU)


def sequence(num_tokens: int, *block_table: int) -> Sequence:
    made = make_sequence(num_tokens)
    made.block_table = list(block_table)
    return made


def decode(of: Sequence) -> ScheduledSequence:
    return ScheduledSequence(of, of.num_tokens - 1, 1, samples=True)


def assert_inputs(actual: ModelInput, expected: ModelInput) -> None:
    """`expected` is narrow: its block tables end with the longest of the batch."""
    for field in dataclasses.fields(ModelInput):
        ours, theirs = getattr(actual, field.name), getattr(expected, field.name)
        if field.name == "block_tables":
            for row, seq_len in enumerate(expected.seq_lens.tolist()):
                used = -(-seq_len // BLOCK_SIZE)
                assert torch.equal(ours[row, :used], theirs[row, :used])
        elif isinstance(ours, torch.Tensor):
            assert ours.dtype == theirs.dtype and torch.equal(ours, theirs), field.name
        else:
            assert ours == theirs, field.name


def assert_as_built(
    inputs: PersistentInputs, scheduled: list[ScheduledSequence], **inflight: dict[Sequence, int]
) -> None:
    batch = ScheduledBatch(scheduled)
    assert_inputs(inputs.fill(batch), build_model_input(batch, BLOCK_SIZE, CPU, **inflight))


def test_random_batches_equal_those_of_the_cpu() -> None:
    """In the order of the CPU's rows: decodes by length, then chunks by length."""
    source = random.Random(0)
    inputs = make_inputs(max_num_tokens=200)
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


def test_a_token_in_flight_comes_from_the_samples_of_the_step_before() -> None:
    inputs = make_inputs()
    first, second, third = sequence(3, 1), sequence(5, 2, 3), sequence(2, 4)
    inputs.fill(ScheduledBatch([decode(first), decode(second)]))
    inputs.keep_samples([first, second], torch.tensor([111, 222]))
    for one in (first, second):
        one.num_inflight_tokens = 1
    scheduled = [decode(third), decode(second)]
    assert_as_built(inputs, scheduled, inflight_token_ids={second: 222})


def test_tables_follow_growth_copies_and_returns() -> None:
    inputs = make_inputs()
    one, other = sequence(8, 1, 2), sequence(8, 3, 4)
    assert_as_built(inputs, [decode(one), decode(other)])
    one.output_token_ids.append(9)
    one.block_table += [5]  # the ninth token crossed an edge
    assert_as_built(inputs, [decode(other), decode(one)])
    one.block_table[2] = 6  # what is written next was shared, and copied
    assert_as_built(inputs, [decode(other), decode(one)])
    other.block_table = [7, 8]  # it was preempted and admitted again
    assert_as_built(inputs, [decode(other), decode(one)])
    one.num_preemptions += 1  # the same, its table filled anew in place
    one.block_table[:] = [10, 11, 12]
    assert_as_built(inputs, [decode(other), decode(one)])
    one.output_token_ids += [9] * 30
    one.block_table += range(20, 40)
    assert_as_built(inputs, [decode(other), decode(one)])


def test_padding_up_to_a_graphs_rows() -> None:
    inputs = make_inputs()
    one = sequence(6, 1, 2)
    padded = inputs.fill(ScheduledBatch([decode(one)]), size=4)
    assert padded.token_ids.tolist() == [one.prompt_token_ids[5], 0, 0, 0]
    assert padded.slot_mapping.tolist() == [2 * BLOCK_SIZE + 1, 0, 0, 0]
    assert padded.query_start_loc.tolist() == [0, 1, 2, 3, 4]
    assert padded.seq_lens.tolist() == [6, 0, 0, 0]
    assert padded.logits_indices.tolist() == [0]
    inputs.fill_with_padding(3)
    views = inputs.views(num_rows=3, num_tokens=3, num_logits=3, max_query_len=1, max_seq_len=64)
    assert (views.seq_lens.tolist(), views.query_start_loc.tolist()) == ([0, 0, 0], [0, 1, 2, 3])


def test_a_chunk_is_padded_in_tokens_and_in_rows() -> None:
    inputs = make_inputs()
    padded = inputs.fill(ScheduledBatch([ScheduledSequence(sequence(6, 1, 2), 0, 6, samples=True)]), size=8)
    assert padded.query_start_loc.tolist() == [0, 6, 7, 8, 8, 8, 8, 8, 8]
    assert padded.positions.tolist() == [0, 1, 2, 3, 4, 5, 0, 0]
    assert (padded.logits_indices.tolist(), padded.max_query_len) == ([5], 6)


def test_tensors_keep_their_place() -> None:
    inputs = make_inputs()
    pointers = [inputs.fill(ScheduledBatch([decode(sequence(2, 1))])).token_ids.data_ptr() for _ in range(5)]
    assert len(set(pointers)) == 1


def test_forks_without_tokens_are_no_rows_and_want_the_logits_of_the_row_before_them() -> None:
    inputs = make_inputs()
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
    forks[1].block_table = [1, 7]  # the shared block was copied
    in_flight = dict(zip([other, first, *forks], [11, 12, 13, 14], strict=True))
    assert_as_built(inputs, [decode(one) for one in (first, *forks)], inflight_token_ids=in_flight)
