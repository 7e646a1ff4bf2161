"""Compare one model by native code and by transformers (`--model-impl`), both in this engine.

    python -m bench model-impls MODEL_DIR --out FILE [--batches 1 8 32] [--tokens 48] [--rounds 3] [--threads 1]

Each round decodes the same prompts with both and measures seconds and CPU time per step, and seconds until all prompts
are computed. Steps alternate, so other load on the machine affects both equally. On a shared machine, compare the CPU
time of one thread.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

from bench.engine.session import EngineSession, NoSteadyStep, step_figures
from bench.engine.side import plain_engine
from bench.provenance import commit
from engine_worker.execution.load.load import load_model_runner
from engine_worker.execution.settings import ExecutionSettings
from engine_worker.execution.step.model_runner import ModelRunner
from engine_worker.scheduling.scheduler import SchedulerConfig
from shared.messages import SamplingParams

IMPLS = ("native", "transformers")
_PROMPT_TOKENS, _MAX_MODEL_LEN, _STEP_TOKENS = 128, 512, 512


def run(runner: ModelRunner, batch: int, num_tokens: int) -> tuple[list[float], float]:
    """Return (seconds per steady step, CPU seconds of the run) for `batch` prompts of `num_tokens` output tokens."""
    config = SchedulerConfig(max_num_seqs=batch, max_num_batched_tokens=_STEP_TOKENS, max_model_len=_MAX_MODEL_LEN)
    sampling = SamplingParams(max_tokens=num_tokens, seed=0, temperature=0.0, ignore_eos=True)
    vocab_size = runner.model_spec.vocab_size
    prompts = [[(100 + row + 7 * index) % vocab_size for index in range(_PROMPT_TOKENS)] for row in range(batch)]
    load = [(prompt, sampling) for prompt in prompts]
    started = time.process_time()
    log = EngineSession(plain_engine(runner, config)).run(load)
    return log.steady_step_seconds(batch), time.process_time() - started


def measured(runners: dict[str, ModelRunner], batch: int, num_tokens: int, rounds: int) -> dict[str, Any]:
    steps: dict[str, list[float]] = {impl: [] for impl in runners}
    prefill_cpu: dict[str, list[float]] = {impl: [] for impl in runners}
    decode_cpu: dict[str, list[float]] = {impl: [] for impl in runners}
    for _ in range(rounds):
        for impl, runner in runners.items():
            _, prompts = run(runner, batch, 1)
            seconds, whole = run(runner, batch, num_tokens)
            steps[impl] += seconds
            prefill_cpu[impl].append(prompts)
            decode_cpu[impl].append((whole - prompts) / (num_tokens - 1))
    figures: dict[str, Any] = {
        impl: step_figures(steps[impl])
        | {
            "step_cpu_ms": round(1e3 * min(decode_cpu[impl]), 2),
            "prompts_cpu_ms": round(1e3 * min(prefill_cpu[impl]), 1),
        }
        for impl in runners
    }
    ratio = figures["transformers"]["step_cpu_ms"] / figures["native"]["step_cpu_ms"]
    return {"batch": batch, **figures, "step_cpu_ratio": round(ratio, 2)}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench model-impls", description=__doc__.splitlines()[0])
    parser.add_argument("model", metavar="PATH", type=Path)
    parser.add_argument("--out", metavar="PATH", type=Path, required=True)
    parser.add_argument("--batches", metavar="N", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--tokens", metavar="N", type=int, default=48)
    parser.add_argument("--rounds", metavar="N", type=int, default=3)
    parser.add_argument("--threads", metavar="N", type=int, default=1)
    options = parser.parse_args(argv)
    runners = {impl: _runner(options.model, impl, max(options.batches), options.threads) for impl in IMPLS}
    try:
        figures = [measured(runners, batch, options.tokens, options.rounds) for batch in options.batches]
    except NoSteadyStep as error:
        parser.error(f"--tokens {options.tokens}: {error}")
    result = {
        "commit": commit(),
        "model": options.model.name,
        "dtype": runners["native"].dtype_name,
        "threads": torch.get_num_threads(),
        "prompt_tokens": _PROMPT_TOKENS,
        "batches": figures,
    }
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    return 0


def _runner(model: Path, impl: str, max_num_seqs: int, num_threads: int) -> ModelRunner:
    settings = ExecutionSettings(
        model=model,
        device="cpu",
        model_impl=impl,
        kv_cache_memory_bytes=2**30,
        max_model_len=_MAX_MODEL_LEN,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=_STEP_TOKENS,
        num_threads=num_threads,
    )
    return load_model_runner(settings, lambda phase, progress, detail: None)
