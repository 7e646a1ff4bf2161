"""ScheduledBatch -> StepDescription -> ModelInput on a CPU: rows in attention order, logits in batch order."""

import torch

from engine_worker.execution.step.describe import StepDescriber
from engine_worker.execution.step.input_builder import HostInputs
from engine_worker.model.model_input import ModelInput
from engine_worker.scheduling.batch import ScheduledBatch, ScheduledSequence
from tests.builders import make_sequence


def scheduled(prompt: list[int], output: list[int], blocks: list[int], start: int, count: int) -> ScheduledSequence:
    sequence = make_sequence(prompt, output_token_ids=output)
    sequence.kv.tables[0].blocks, sequence.kv.num_computed_tokens = blocks, start
    return ScheduledSequence(sequence, start, count, samples=start + count == sequence.num_tokens)


def model_input_of(batch: ScheduledBatch) -> ModelInput:
    return HostInputs(block_size=4).unpack(StepDescriber(4, decodes_first=True).describe(batch))


def test_model_input_mixed_batch_is_in_row_order() -> None:
    batch = ScheduledBatch(
        [
            scheduled([10, 11, 12, 13, 14, 15, 16], [], [7, 3], start=2, count=4),  # a chunk inside a prompt
            scheduled([20, 21, 22, 23], [24, 25], [5, 9, 4], start=5, count=1),  # decode; third block is for later
            scheduled([30, 31], [], [8], start=0, count=2),  # a whole prompt
            scheduled([40], [41], [2], start=1, count=1),  # shorter decode
        ]
    )
    result = model_input_of(batch)
    # Row order: decodes by length (4th, 2nd), then prefills by length (3rd, 1st).
    assert result.token_ids.tolist() == [41, 25, 30, 31, 12, 13, 14, 15]
    assert result.positions.tolist() == [1, 5, 0, 1, 2, 3, 4, 5]
    assert result.slot_mapping[0].tolist() == [9, 37, 32, 33, 30, 31, 12, 13]  # block * 4 + offset
    assert result.query_start_loc.tolist() == [0, 1, 2, 4, 8]
    assert result.seq_lens.tolist() == [2, 6, 2, 6]
    assert result.block_tables[0].tolist() == [[2, 0], [5, 9], [8, 0], [7, 3]]
    assert (result.max_query_len, result.max_seq_len) == (4, 6)
    # The first sequence does not sample; the others are in batch order.
    assert result.logits_indices.tolist() == [1, 3, 0]


def test_model_input_without_samples_has_no_logits() -> None:
    batch = ScheduledBatch([scheduled([1, 2, 3, 4], [], [1], start=0, count=2)])
    result = model_input_of(batch)
    assert result.logits_indices.tolist() == [] and result.logits_indices.dtype == torch.int64
