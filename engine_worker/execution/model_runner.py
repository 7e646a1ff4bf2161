"""Carries out one ScheduledBatch: block copies, forward pass, sampling. The only code that drives the device.

Implements engine.BatchExecutor. Knows nothing of the queue, of finishing, or of which sequence comes next.
"""

from engine_worker.model.config import ModelConfig
from engine_worker.scheduling.batch import ScheduledBatch, StepResult


class ModelRunner:
    model_config: ModelConfig
    num_blocks: int  # of the pool, block 0 included, which is never allocated
    block_size: int
    max_model_len: int

    def execute(self, batch: ScheduledBatch) -> StepResult:
        raise NotImplementedError
