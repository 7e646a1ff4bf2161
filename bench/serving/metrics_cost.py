"""Measure the cost of the metrics: no device, no model, one thread.

    step      observing one step of 256 decoding sequences, and the times of their requests: microseconds, and the share
              of a step of S milliseconds (--step-milliseconds)
    scrape    one snapshot of the engine with its text, and the gateway's text after some requests: milliseconds

Each figure is the minimum of several repeats, because other processes only add time, beside the median.
"""

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from prometheus_client import generate_latest

from bench.provenance import commit
from bench.serving.scripted_worker import BLOCK_SIZE, MAX_MODEL_LEN_TOKENS, NUM_BLOCKS, VOCAB_SIZE, ClockDevice
from engine_worker.engine import Engine
from engine_worker.execution.step.memory import memory_by_use
from engine_worker.kv.kv_cache_manager import KVCacheManager
from engine_worker.metrics import EngineInfo, WorkerMetrics
from engine_worker.request_times import RequestClock
from engine_worker.scheduling.scheduler import Scheduler, SchedulerConfig
from engine_worker.status import WorkerStatus
from engine_worker.transport.claims import ClaimedRequest
from gateway.metrics import GatewayMetrics
from shared.messages import GenerationRequest, SamplingParams

TARGETS = {"share_of_step": 0.01, "scrape_milliseconds": 10.0}
PROMPT_TOKENS = 256


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench metrics-cost", description=__doc__.split("\n")[0])
    parser.add_argument("--num-sequences", metavar="N", type=int, default=256)
    parser.add_argument(
        "--step-milliseconds",
        metavar="MILLISECONDS",
        type=float,
        default=10.0,
        help="step duration for the share (default: %(default)s)",
    )
    parser.add_argument("--repeats", metavar="N", type=int, default=400)
    parser.add_argument("--output", metavar="PATH", type=Path, help="file to write the JSON to")
    options = parser.parse_args(argv)
    observe, scrape = worker_side(options.num_sequences)
    step_microseconds = timed(observe, options.repeats, 1e6)
    result: dict[str, Any] = {
        "command": " ".join(["python -m bench metrics-cost", *argv]),
        "commit": commit(),
        "python": platform.python_version(),
        "targets": TARGETS,
        "num_sequences": options.num_sequences,
        "num_blocks": NUM_BLOCKS,
        "step_microseconds": step_microseconds,
        "share_of_step": step_microseconds["median"] / (options.step_milliseconds * 1e3),
        "worker_scrape_milliseconds": timed(scrape, options.repeats, 1e3),
        "gateway_scrape_milliseconds": timed(gateway_side(), options.repeats, 1e3),
    }
    text = json.dumps(result, indent=2) + "\n"
    sys.stdout.write(text)
    if options.output is not None:
        options.output.write_text(text)
    return 0


def timed(work: Callable[[], object], repeats: int, scale: float) -> dict[str, float]:
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return {"least": min(seconds) * scale, "median": statistics.median(seconds) * scale}


def worker_side(num_sequences: int) -> tuple[Callable[[], None], Callable[[], bytes]]:
    """Return a worker's work after each step and at a scrape, while `num_sequences` decode."""
    config = SchedulerConfig(
        max_num_seqs=num_sequences, max_num_batched_tokens=8192, max_model_len=MAX_MODEL_LEN_TOKENS
    )
    scheduler = Scheduler(config, KVCacheManager(NUM_BLOCKS, BLOCK_SIZE))
    engine = Engine(
        scheduler, ClockDevice(0.0), eos_token_ids=(), vocab_size=VOCAB_SIZE, clock=time.perf_counter
    )  # fmt: skip
    status = WorkerStatus("worker", "0")
    metrics = WorkerMetrics("worker", "model", "0", status)
    metrics.engine_is_ready(
        EngineInfo(
            device="gpu",
            dtype="bfloat16",
            kv_cache_dtype="bfloat16",
            block_size_bytes=2**21,
            max_model_len=4096,
            memory_bytes=partial(memory_by_use, torch.device("cpu"), 0, 0, 0),
        )
    )
    clock = RequestClock([metrics])
    request_ids = [f"{number:032x}" for number in range(num_sequences)]
    for number, request_id in enumerate(request_ids):
        prompt = [100 + (number + position) % 40_000 for position in range(PROMPT_TOKENS)]
        request = GenerationRequest(
            request_id=request_id, prompt_token_ids=prompt, sampling=SamplingParams(max_tokens=1000, seed=number)
        )
        clock.claimed(ClaimedRequest(request, [], "g", attempt=1, queue="q", entry_id=b"1-0", solo=False))
        engine.add_request(request)
    while engine.last_step.num_sequences < num_sequences or engine.last_step.num_tokens > num_sequences:
        engine.step()
    step = engine.last_step

    def observe() -> None:
        metrics.observe_step(step, publish_seconds=0.001)
        clock.stored(request_ids)

    def scrape() -> bytes:
        status.stats = engine.stats()
        return metrics.render()

    return observe, scrape


def gateway_side() -> Callable[[], bytes]:
    metrics = GatewayMetrics()
    for route in ("/v1/chat/completions", "/v1/completions", "/v1/models", "/tokenize", "/ready", "/metrics"):
        for code in ("200", "400", "499", "503"):
            metrics.http_duration.labels(route, "POST", code).observe(0.1)
    for command in ("EVALSHA", "SET", "XLEN", "XINFO GROUPS", "XRANGE", "TIME", "GET", "HMGET"):
        metrics.observe_redis(command, 0.0001, failed=False)
    metrics.of_model("model")
    return lambda: generate_latest(metrics.exposed)
