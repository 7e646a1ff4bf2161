"""A replica that receives serialized steps computes the same as a local one."""

from pathlib import Path

import pytest
import torch

from engine_worker.execution.step.describe import StepDescriber
from engine_worker.execution.step.step_description import StepDescription
from engine_worker.kv.transfers import BlockCopy, Moves, Transfers
from engine_worker.scheduling.batch import ScheduledBatch, ScheduledSequence
from tests.builders import make_sequence
from tests.engine_worker.execution.reference import make_runner, write_model

BLOCK_SIZE = 8


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tiny"))


def test_replica_serialized_steps_give_same_logits_and_pool(model_dir: Path) -> None:
    here, there = (make_runner(model_dir, num_blocks=16, block_size=BLOCK_SIZE).replica for _ in range(2))
    describer = StepDescriber(BLOCK_SIZE, decodes_first=True)
    long, short = make_sequence(20, "long"), make_sequence(9, "short")
    long.kv.tables[0].blocks, short.kv.tables[0].blocks = [3, 9, 1], [4, 2]
    steps = [
        ScheduledBatch([ScheduledSequence(long, 0, 12, samples=False), ScheduledSequence(short, 0, 9, samples=True)]),
        # The next token of `short` is in flight, and its last block was shared, so it is copied first.
        ScheduledBatch(
            [ScheduledSequence(short, 9, 1, samples=True), ScheduledSequence(long, 12, 8, samples=True)],
            Transfers(Moves(copies=[BlockCopy(2, 5)])),
        ),
    ]
    for number, batch in enumerate(steps):
        if number:
            short.num_inflight_tokens, short.kv.tables[0].blocks[1] = 1, 5
        described = describer.describe(batch)
        found = []
        for replica, description in ((here, described), (there, StepDescription.from_bytes(described.to_bytes()))):
            logits = replica.run(replica.prepare(description))
            replica.keep_samples(logits.argmax(-1))
            found.append(logits)
        describer.keep_samples([scheduled.sequence for scheduled in batch.sequences if scheduled.samples])
        assert len(found[0]) == number + 1 and found[0].std() > 0.1
        assert torch.equal(*found)
    assert torch.equal(here.kv_cache.pool, there.kv_cache.pool)
