"""A real worker process on a fake model: python scripted_worker.py [--script-...] WORKER ARGUMENTS.

The tokens are hashes of the prefix, so a worker that resumes a request must continue it exactly. Steps can be slow,
hang or raise.
"""

import argparse
import os
import sys
import time
from pathlib import Path

from engine_worker.__main__ import run
from engine_worker.kv.kv_durations import KVDurations
from engine_worker.kv.kv_events import KVEventLog
from engine_worker.kv.preemption import HostTierConfig
from engine_worker.kv.sequence import Sequence
from engine_worker.metrics import EngineInfo
from engine_worker.scheduling.batch import ScheduledBatch
from engine_worker.service import LoadedEngine, Report
from engine_worker.settings import WorkerSettings
from shared.logs import configure_logging
from shared.settings import load_settings
from tests.builders import EOS_TOKEN_ID, VOCAB_SIZE, FakeModelRunner, make_engine

MAX_MODEL_LEN = 2048


def main() -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--script-step-seconds", type=float, default=0.0)
    parser.add_argument("--script-hang-at-step", type=int, default=0)
    parser.add_argument("--script-raise-at-step", type=int, default=0)
    parser.add_argument("--script-poison-token", type=int, default=-1, help="in a prompt, it kills the process")
    parser.add_argument("--script-pace-file", type=Path, help="read before each step: how many seconds it takes")
    parser.add_argument("--script-num-blocks", type=int, default=1025)
    parser.add_argument("--script-block-size", type=int, default=4)
    parser.add_argument("--script-num-host-blocks", type=int, default=0)
    parser.add_argument("--script-vocab-size", type=int, default=VOCAB_SIZE)
    parser.add_argument("--script-ignore-eos", action="store_true", help="an answer ends at its max_tokens only")
    parser.add_argument("--script-failing-token", type=int, default=-1, help="in a prompt, its step fails it")
    parser.add_argument("--script-poison-after", type=int, default=0, help="from this output index on")
    script, argv = parser.parse_known_args()
    settings = load_settings(WorkerSettings, argv, os.environ, prog="pagestream worker").settings
    configure_logging(settings.log_format)
    shape = {
        "num_blocks": script.script_num_blocks,
        "block_size": script.script_block_size,
        "vocab_size": script.script_vocab_size,
    }
    num_steps = 0

    def is_lethal(sequence: Sequence) -> bool:
        poisoned = script.script_poison_token in sequence.prompt_token_ids
        return poisoned and sequence.num_output_tokens >= script.script_poison_after

    def before_step(batch: ScheduledBatch) -> None:
        nonlocal num_steps
        num_steps += 1
        paced = float(script.script_pace_file.read_text()) if script.script_pace_file else script.script_step_seconds
        time.sleep(paced)  # the script's step time, not a wait for an event
        if any(is_lethal(scheduled.sequence) for scheduled in batch.sequences):
            os._exit(139)  # the effect of a segmentation fault
        for scheduled in batch.sequences:
            if script.script_failing_token in scheduled.sequence.prompt_token_ids:
                executor.failures[scheduled.sequence.request_id] = "scripted failure of a request"
        if num_steps == script.script_hang_at_step:
            time.sleep(3600)
        if num_steps == script.script_raise_at_step:
            raise RuntimeError("scripted failure of the device")

    executor = FakeModelRunner(before_step=before_step, **shape)

    def load(report: Report) -> LoadedEngine:
        report("load", 1.0, "scripted")
        num_host_blocks = script.script_num_host_blocks
        host_tier = HostTierConfig(num_blocks=num_host_blocks) if num_host_blocks else None
        engine = make_engine(
            executor,
            **shape,
            eos_token_ids=() if script.script_ignore_eos else (EOS_TOKEN_ID,),
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=32,
            max_num_batched_tokens=256,
            host_tier=host_tier,
            clock=time.perf_counter,
            events=KVEventLog(block_bytes=1, clock=time.time, durations=KVDurations(time.monotonic)),
        )
        info = EngineInfo(
            device="cpu",
            dtype="none",
            kv_cache_dtype="none",
            block_size_bytes=1,
            max_model_len=MAX_MODEL_LEN,
            memory_bytes=lambda: {"kv": 0},
        )
        return LoadedEngine(engine, info)

    return run(settings, load)


if __name__ == "__main__":
    status = main()
    sys.stderr.flush()
    os._exit(status)
