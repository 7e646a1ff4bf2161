"""Run a quantized model in every schedule: `python -m tests.engine_worker.model.quantized_schedules DIR`.

Prints JSON: the number of quantized linear layers, and by KV dtype and schedule the tokens and log-probabilities of
each prompt. On CUDA (or with `--device cpu`) with `--deterministic`, whose settings must be made before CUDA starts,
hence in its own process.
"""

import gc
import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from engine_worker.execution.load.load import load_model_runner
from engine_worker.execution.settings import CUDAGRAPH_MODES, ExecutionSettings
from engine_worker.execution.step.model_runner import ModelRunner
from engine_worker.kv.preemption import PreemptionMode
from engine_worker.model.implementation import blueprint_from_directory
from engine_worker.model.spec import kv_layout
from shared.messages import GenerationRequest, StoredChoice, TokenEvent, decoded_logprobs
from tests.builders import make_request
from tests.engine_worker.execution.reference import make_engine
from tests.engine_worker.model.families import prompts

ROOT = Path(__file__).parents[3]
NUM_TOKENS, HALF = 40, 17
# name: (blocks of 16 tokens, tokens per step, sequences)
SCHEDULES = {
    "all at once": (64, 512, 8), "each alone": (64, 512, 1), "chunks": (64, 24, 8), "preempted": (14, 512, 8),
}  # fmt: skip
DTYPES = {"bf16": "bfloat16", "fp8": "float8_e4m3fn"}
Outputs = dict[str, tuple[list[int], list[float]]]


def requests(vocab_size: int) -> list[GenerationRequest]:
    return [
        make_request(prompt, f"p{index}", max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=1)
        for index, prompt in enumerate(prompts(vocab_size))
    ]


def load(directory: Path, device: str, kv: str, schedule: str, mode: str) -> ModelRunner:
    num_blocks, num_tokens, num_sequences = SCHEDULES[schedule]
    layout = kv_layout(blueprint_from_directory(directory, "auto").shape, 16, DTYPES[kv])
    settings = ExecutionSettings(
        model=directory, device=device, dtype="bfloat16", kv_cache_dtype=kv, deterministic=device == "cuda",
        kv_cache_memory_bytes=num_blocks * len(layout.groups) * layout.block_bytes, swap_space_bytes=0,
        max_model_len=208, max_num_seqs=num_sequences, max_num_batched_tokens=num_tokens, cudagraph_mode=mode,
    )  # fmt: skip
    return load_model_runner(settings, lambda phase, progress, detail: None)


def run(runner: ModelRunner, schedule: str, heads: Outputs | None = None) -> tuple[Outputs, int]:
    """Return the outputs and the number of preemptions; `heads` are tokens that a lost worker has already generated."""
    _, num_tokens, num_sequences = SCHEDULES[schedule]
    engine = make_engine(
        runner, preemption_mode=PreemptionMode.RECOMPUTE, max_num_seqs=num_sequences, max_num_batched_tokens=num_tokens
    )
    outputs: Outputs = {}
    for request in requests(runner.model_spec.vocab_size):
        tokens, scores = heads[request.request_id] if heads else ([], [])
        outputs[request.request_id] = (tokens[:HALF], scores[:HALF])
        engine.add_request(request, [StoredChoice(token_ids=tokens[:HALF])] if heads else [])
    while engine.has_work:
        for event in engine.step():
            if isinstance(event, TokenEvent):
                tokens, scores = outputs[event.request_id]
                tokens += event.token_ids
                scores += [one.logprob for one in decoded_logprobs(event.logprobs or [])]
    return outputs, sum(engine.stats().counters.preemptions.values())


def outputs_by_schedule(directory: Path, device: str, kv: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for mode in CUDAGRAPH_MODES if device == "cuda" else ("none",):
        for schedule in SCHEDULES:
            outputs, preemptions = run(load(directory, device, kv, schedule, mode), schedule)
            found[f"{schedule}, graphs {mode}"] = {"outputs": outputs, "preemptions": preemptions}
        whole = found[f"all at once, graphs {mode}"]["outputs"]
        outputs, _ = run(load(directory, device, kv, "all at once", mode), "all at once", whole)
        found[f"taken over, graphs {mode}"] = {"outputs": outputs, "preemptions": 0}
    return found


def num_linear_layers(directory: Path, device: str) -> int:
    if device != "cuda":
        return 0
    fp8, int4 = (import_module(f"engine_worker.model.quantization.{name}") for name in ("fp8_cuda", "int4_cuda"))
    linear = (fp8.Fp8Linear, int4.W4Linear)  # imports triton
    runner = load(directory, device, "bf16", "all at once", "none")
    number = sum(isinstance(one, linear) for one in gc.get_objects())
    del runner
    return number


def results_of(directory: Path, *options: str) -> dict[str, Any]:
    """Return what main() prints in a process of its own."""
    command = [sys.executable, "-m", "tests.engine_worker.model.quantized_schedules", str(directory), *options]
    done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def check_outputs(kv: str, outputs: dict[str, Any]) -> None:
    """Check that all schedules have the same outputs."""
    expected = outputs["all at once, graphs none"]["outputs"]
    assert all(len(tokens) == len(scores) == 40 for tokens, scores in expected.values())
    for schedule, found in outputs.items():
        assert found["outputs"] == expected, (kv, schedule)
        assert (found["preemptions"] > 0) == schedule.startswith("preempted"), (kv, schedule)


def main() -> None:
    directory, device = Path(sys.argv[1]), sys.argv[3] if len(sys.argv) > 3 else "cuda"
    result = {"linear_layers": num_linear_layers(directory, device)}
    print(json.dumps(result | {"kv": {kv: outputs_by_schedule(directory, device, kv) for kv in DTYPES}}))


if __name__ == "__main__":
    main()
