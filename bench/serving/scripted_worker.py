"""A worker whose device only waits: python -m bench.serving.scripted_worker --step-seconds S WORKER FLAGS.

A step takes S seconds, plus --token-seconds per computed token. Tokens are random, or with --tell-time encode the end
of their step: id - TIME_BASE is milliseconds of the monotonic clock, modulo TIME_MODULUS. What remains to be measured
is everything else: scheduling, journal, store, gateway, client.
"""

import argparse
import os
import random
import sys
import time
from itertools import cycle
from pathlib import Path
from typing import TextIO

from engine_worker.__main__ import run
from engine_worker.engine import Engine
from engine_worker.kv.kv_cache_manager import KVCacheManager
from engine_worker.kv.sequence import Sequence
from engine_worker.metrics import EngineInfo
from engine_worker.scheduling.batch import ScheduledBatch, StepResult
from engine_worker.scheduling.scheduler import Scheduler, SchedulerConfig
from engine_worker.service import LoadedEngine, Report
from engine_worker.settings import WorkerSettings
from shared.logs import configure_logging
from shared.messages import MAX_LOGPROBS, EncodedLogprobs, PromptLogprobs, TokenLogprobs, encoded_logprobs
from shared.settings import load_settings

MAX_MODEL_LEN_TOKENS = 4096
NUM_BLOCKS, BLOCK_SIZE = 60_000, 16
VOCAB_SIZE = 49_152
NUM_SCRIPTED_TOKENS = 100_003
TIME_BASE, TIME_MODULUS = 1_000, 48_000


_RANKED = [
    encoded_logprobs(TokenLogprobs(-0.5, tuple(range(100, 100 + count)), tuple(-0.5 - rank for rank in range(count))))
    for count in range(MAX_LOGPROBS + 1)
]


class ClockDevice:
    """Steps follow without gaps if they are submitted in time, as on a device with a queue."""

    def __init__(self, step_seconds: float, token_seconds: float = 0.0, *, tells_time: bool = False) -> None:
        source = random.Random(1)
        self._step_seconds = step_seconds
        self._token_seconds = token_seconds
        self._tells_time = tells_time
        self._ends_at = 0.0
        self._token_ids = cycle(source.randrange(100, VOCAB_SIZE) for _ in range(NUM_SCRIPTED_TOKENS))

    def submit(self, batch: ScheduledBatch) -> "ClockStep":
        seconds = self._step_seconds + self._token_seconds * sum(one.num_new_tokens for one in batch.sequences)
        self._ends_at = max(self._ends_at, time.perf_counter()) + seconds
        sampled = [[self._token_id()] if scheduled.samples else None for scheduled in batch.sequences]
        return ClockStep(self._ends_at, StepResult(sampled, logprobs=_logprobs(batch), prompt_logprobs=_scores(batch)))

    def _token_id(self) -> int:
        return TIME_BASE + int(1000 * self._ends_at) % TIME_MODULUS if self._tells_time else next(self._token_ids)


def _logprobs(batch: ScheduledBatch) -> list[list[EncodedLogprobs] | None]:
    asked = [scheduled.sequence.sampling.logprobs if scheduled.samples else None for scheduled in batch.sequences]
    return [_ranked(count) for count in asked] if any(count is not None for count in asked) else []


def _scores(batch: ScheduledBatch) -> list[tuple[Sequence, PromptLogprobs]]:
    found = []
    for scheduled in batch.sequences:
        count = scheduled.sequence.sampling.prompt_logprobs
        if count is not None and (scored := scheduled.scored_tokens):
            found.append((scheduled.sequence, PromptLogprobs(scored.start, [_RANKED[count]] * len(scored))))
    return found


def _ranked(count: int | None) -> list[EncodedLogprobs] | None:
    return None if count is None else [_RANKED[count]]


class ClockStep:
    def __init__(self, ends_at: float, result: StepResult) -> None:
        self._ends_at = ends_at
        self._result = result

    def collect(self) -> StepResult:
        time.sleep(max(0.0, self._ends_at - time.perf_counter()))  # the step
        return self._result


class LoggingEngine(Engine):
    abort_log: TextIO

    def abort_request(self, request_id: str) -> None:
        super().abort_request(request_id)
        self.abort_log.write(f"{request_id} {time.monotonic()}\n")


def _load_until(path: Path) -> None:
    """Wait until the benchmark creates `path`; another file tells it that loading has begun."""
    path.with_suffix(".loading").touch()
    while not path.exists():
        time.sleep(0.01)


def main() -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--step-seconds", metavar="SECONDS", type=float, required=True)
    parser.add_argument("--token-seconds", metavar="SECONDS", type=float, default=0.0)
    parser.add_argument("--tell-time", action="store_true")
    parser.add_argument("--num-blocks", metavar="N", type=int, default=NUM_BLOCKS, help="KV blocks of 16 tokens")
    parser.add_argument("--load-until", metavar="PATH", type=Path, help="finish loading when this file exists")
    parser.add_argument(
        "--log-aborts", metavar="PATH", type=Path, help="file for aborts: request id and monotonic seconds per line"
    )
    script, worker_flags = parser.parse_known_args()
    settings = load_settings(WorkerSettings, worker_flags, os.environ, prog="pagestream worker").settings
    configure_logging(settings.log_format)

    def load(report: Report) -> LoadedEngine:
        if script.load_until:
            _load_until(script.load_until)
        report("load", 1.0, "scripted")
        max_model_len = settings.execution.max_model_len or MAX_MODEL_LEN_TOKENS
        config = SchedulerConfig(
            max_num_seqs=settings.execution.max_num_seqs or 256,
            max_num_batched_tokens=8192,
            max_model_len=max_model_len,
        )
        engine = (LoggingEngine if script.log_aborts else Engine)(
            Scheduler(config, KVCacheManager(script.num_blocks, BLOCK_SIZE)),
            ClockDevice(script.step_seconds, script.token_seconds, tells_time=script.tell_time),
            eos_token_ids=(),
            vocab_size=VOCAB_SIZE,
            clock=time.perf_counter,
            async_scheduling=True,
        )
        if isinstance(engine, LoggingEngine):
            engine.abort_log = script.log_aborts.open("w", buffering=1)
        info = EngineInfo(
            device="cpu",
            dtype="none",
            kv_cache_dtype="none",
            block_size_bytes=1,
            max_model_len=max_model_len,
            memory_bytes=lambda: {"kv": 0},
        )
        return LoadedEngine(engine, info)

    return run(settings, load)


if __name__ == "__main__":
    status = main()
    sys.stderr.flush()
    os._exit(status)  # as the worker itself does
