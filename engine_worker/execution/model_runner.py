"""Carries out one ScheduledBatch: block copies, forward pass, sampling. The only code that drives the device.

Implements engine.BatchExecutor. Knows nothing of the queue, of finishing, or of which sequence comes next.
"""

import time
from dataclasses import dataclass

import torch

from engine_worker.execution.input_builder import build_model_input
from engine_worker.execution.kv_cache import KVCache
from engine_worker.execution.sampler import Sampler, Samples
from engine_worker.model.config import ModelConfig
from engine_worker.model.transformer import Transformer
from engine_worker.scheduling.batch import FinishedStep, ScheduledBatch, StepResult
from engine_worker.scheduling.sequence import Sequence


@dataclass(frozen=True, kw_only=True)
class MeasuredSpeeds:
    device_to_host_bytes_per_second: float
    host_to_device_bytes_per_second: float
    prefill_tokens_per_second: float


class ModelRunner:
    def __init__(
        self, model: Transformer, kv_cache: KVCache, sampler: Sampler, max_model_len: int, weights_bytes: int = 0
    ) -> None:
        self.model_config: ModelConfig = model.config
        self.device_type: str = kv_cache.pool.device.type
        self.dtype_name = str(model.dtype).removeprefix("torch.")
        self.weights_bytes = weights_bytes
        self.kv_cache_bytes: int = kv_cache.pool.nbytes
        self.num_blocks = kv_cache.num_blocks  # block 0 included, which is never allocated
        self.num_host_blocks = kv_cache.num_host_blocks  # 0: there is no host pool
        self.speeds: MeasuredSpeeds | None = None  # measured by the loader if there is a host pool
        self.block_size = kv_cache.block_size
        self.max_model_len = max_model_len
        self._model = model
        self._kv_cache = kv_cache
        self._device = model.attach(kv_cache.pool)
        self._sampler = sampler
        self._inflight_token_ids: dict[Sequence, int] = {}  # what the last batch sampled

    def execute(self, batch: ScheduledBatch) -> StepResult:
        return self.submit(batch).collect()

    @torch.inference_mode()
    def submit(self, batch: ScheduledBatch) -> FinishedStep:
        started = time.perf_counter()
        self._kv_cache.apply_transfers(batch)
        if not batch.sequences:  # all that could run waits for blocks from the host
            return FinishedStep(StepResult([], transfer_times=self._kv_cache.finished_transfers()))
        model_input = build_model_input(batch, self.block_size, self._kv_cache.pool.device, self._inflight_token_ids)
        prepared = time.perf_counter()
        logits = self._model.forward(model_input, self._device)
        forwarded = time.perf_counter()
        sampling = [scheduled.sequence for scheduled in batch.sequences if scheduled.samples]
        indices = [scheduled.output_index for scheduled in batch.sequences if scheduled.samples]
        samples = self._sampler.sample(logits, sampling, indices) if sampling else Samples([])
        # A sequence that failed may be in the next batch already; whatever is computed for it there is dropped.
        self._inflight_token_ids = {s: token_id or 0 for s, token_id in zip(sampling, samples.token_ids, strict=True)}
        sampled, logprobs = iter(samples.token_ids), iter(samples.logprobs)
        result = StepResult(
            sampled_token_ids=[next(sampled) if scheduled.samples else None for scheduled in batch.sequences],
            failures=samples.failures,
            logprobs=[next(logprobs) if scheduled.samples else None for scheduled in batch.sequences]
            if samples.logprobs
            else [],
            # On CUDA the forward pass is only enqueued here: the sampler waits for it, and its share has that time.
            phase_seconds={
                "prepare": prepared - started,
                "forward": forwarded - prepared,
                "sample": time.perf_counter() - forwarded,
            },
            transfer_times=self._kv_cache.finished_transfers(),
        )
        return FinishedStep(result)
