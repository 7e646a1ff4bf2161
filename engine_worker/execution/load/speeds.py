"""Measure the speeds of KV transfers, prefill, and decode at start, with the code and shapes that serve.

The choice between swap and recompute at a preemption uses transfers and prefill. The decode speed is an estimate of a
CPU's throughput for the log.
"""

import time

import torch

from engine_worker.execution.step.model_runner import MeasuredSpeeds, ModelRunner
from engine_worker.execution.step.replica import StepReplica
from engine_worker.kv.transfers import BlockCopy, Moves, Transfers
from engine_worker.scheduling.batch import ScheduledBatch

_NUM_BLOCKS = 64  # 128 MiB of an 8B model in bf16: 3 ms over PCIe 5
_PREFILL_TOKENS = 512
_DECODE_TOKENS = 32


def measure_speeds(runner: ModelRunner, max_tokens: int) -> MeasuredSpeeds:
    """Measure transfers and prefill; the second of two runs counts. Overwrites free blocks of both pools.

    `max_tokens`: the maximum of tokens in a step.
    """
    for _ in range(2):
        store, fetch = _transfer_bytes_per_second(runner.replica)
        prefill = _prefill_tokens_per_second(runner, max_tokens)
    return MeasuredSpeeds(
        device_to_host_bytes_per_second=store,
        host_to_device_bytes_per_second=fetch,
        prefill_tokens_per_second=prefill,
    )


def decode_tokens_per_second(runner: ModelRunner) -> float:
    """Measure decode steps of one short sequence; the best of three counts."""
    batch = runner.synthetic_batch(1, min(_DECODE_TOKENS, runner.max_model_len) - 1, 1)
    return 1 / min(_step_seconds(runner, batch) for _ in range(3))


def _transfer_bytes_per_second(replica: StepReplica) -> tuple[float, float]:
    """Return the speeds out and in, measured one after the other. In a group all ranks transfer at once."""
    kv_cache = replica.kv_cache
    num_blocks = min(_NUM_BLOCKS, kv_cache.num_host_blocks - 1, kv_cache.num_blocks - 1)
    copies = [BlockCopy(block_id, block_id) for block_id in range(1, num_blocks + 1)]
    seconds = []
    for moves in (Moves(swap_out=copies), Moves(swap_in=copies)):
        replica.move_blocks(Transfers(moves))
        if kv_cache.pool.is_cuda:
            torch.cuda.synchronize(kv_cache.pool.device)
        (transfer,) = replica.finished_transfers()
        seconds.append(transfer.swap_out_seconds + transfer.swap_in_seconds)
    num_bytes = num_blocks * kv_cache.pool[0].nbytes
    return num_bytes / seconds[0], num_bytes / seconds[1]


def _prefill_tokens_per_second(runner: ModelRunner, max_tokens: int) -> float:
    num_tokens = min(_PREFILL_TOKENS, max_tokens, runner.max_model_len, (runner.num_blocks - 1) * runner.block_size)
    return num_tokens / _step_seconds(runner, runner.synthetic_batch(1, 0, num_tokens))


def _step_seconds(runner: ModelRunner, batch: ScheduledBatch) -> float:
    started = time.perf_counter()
    runner.execute(batch)
    return time.perf_counter() - started
