"""Measure how much longer a decode step takes when every sequence follows a JSON schema.

    python -m bench grammar-steps MODEL_DIR --out FILE [--batch 32] [--tokens 64] [--rounds 3] [--device cuda]
        [--load-format dummy]

Each round decodes the same prompts without a grammar, then bound to lists of strings that never end, and measures
seconds and CPU time per step. On CUDA the engine schedules one step ahead, as a worker does. bench.engine.structured
measures masks alone.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

from bench.engine.session import EngineSession, step_figures
from bench.provenance import commit
from engine_worker.engine import Engine
from engine_worker.execution.load.load import load_model_runner
from engine_worker.execution.settings import ExecutionSettings
from engine_worker.execution.step.model_runner import ModelRunner
from engine_worker.kv.kv_cache_manager import KVCacheManager
from engine_worker.scheduling.scheduler import Scheduler, SchedulerConfig
from shared.grammars import json_schema_grammar
from shared.messages import Grammar, SamplingParams

_PROMPT_TOKENS, _MAX_MODEL_LEN = 32, 1024
_ENDLESS = json_schema_grammar({"type": "array", "items": {"type": "string"}, "minItems": 10_000})


def decode(runner: ModelRunner, grammar: Grammar | None, batch: int, num_tokens: int) -> tuple[list[float], float]:
    """Return (seconds of each steady step, CPU seconds per step) for `batch` sequences of `num_tokens` each."""
    config = SchedulerConfig(max_num_seqs=batch, max_num_batched_tokens=2048, max_model_len=_MAX_MODEL_LEN)
    engine = Engine(
        Scheduler(config, KVCacheManager(runner.num_blocks, runner.block_size)),
        runner,
        eos_token_ids=(),
        vocab_size=runner.model_spec.vocab_size,
        clock=time.perf_counter,
        async_scheduling=runner.device_type == "cuda",
    )
    load = [
        ([100 + row] * _PROMPT_TOKENS, SamplingParams(max_tokens=num_tokens, seed=row, grammar=grammar))
        for row in range(batch)
    ]
    cpu_started = time.process_time()
    log = EngineSession(engine).run(load)
    return log.steady_step_seconds(batch), (time.process_time() - cpu_started) / len(log.step_ends)


def measured(runner: ModelRunner, batch: int, num_tokens: int, rounds: int) -> dict[str, Any]:
    kinds: dict[str, Grammar | None] = {"free": None, "bound": _ENDLESS}
    steps: dict[str, list[float]] = {kind: [] for kind in kinds}
    cpu: dict[str, list[float]] = {kind: [] for kind in kinds}
    for grammar in kinds.values():  # warm-up for what is compiled or allocated on first use
        decode(runner, grammar, batch, 12)
    for _ in range(rounds):
        for kind, grammar in kinds.items():
            seconds, cpu_seconds = decode(runner, grammar, batch, num_tokens)
            steps[kind] += seconds
            cpu[kind].append(cpu_seconds)
    figures = {kind: step_figures(steps[kind]) | {"cpu_ms": round(1e3 * min(cpu[kind]), 3)} for kind in kinds}
    longer = figures["bound"]["p50_ms"] - figures["free"]["p50_ms"]
    return {**figures, "longer_p50_ms": round(longer, 3)}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench grammar-steps", description=__doc__.splitlines()[0])
    parser.add_argument("model", metavar="PATH", type=Path)
    parser.add_argument("--out", metavar="PATH", type=Path, required=True)
    parser.add_argument("--batch", metavar="N", type=int, default=32)
    parser.add_argument("--tokens", metavar="N", type=int, default=64)
    parser.add_argument("--rounds", metavar="N", type=int, default=3)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--load-format", default="auto", choices=("auto", "dummy"), help="dummy: random weights")
    options = parser.parse_args(argv)
    settings = ExecutionSettings(
        model=options.model,
        device=options.device,
        load_format=options.load_format,
        kv_cache_memory_bytes=2**30,
        swap_space_bytes=0,
        max_model_len=_MAX_MODEL_LEN,
        max_num_seqs=options.batch,
        max_num_batched_tokens=2048,
    )
    runner = load_model_runner(settings, lambda phase, progress, detail: None)
    result = {
        "commit": commit(),
        "device": options.device,
        "threads": torch.get_num_threads(),
        "batch": options.batch,
        **measured(runner, options.batch, options.tokens, options.rounds),
    }
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    return 0
