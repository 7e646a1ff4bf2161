"""Run one fp8 model in every schedule: `python -m tests.engine_worker.model.fp8_schedules DIR [--device cpu]`.

Prints JSON: the number of fp8 linear layers, and by KV dtype and schedule the tokens and log-probabilities of each
prompt. On CUDA with `--deterministic`, whose settings must be made before CUDA starts, hence in its own process.
"""

import gc
import json
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
    linear = import_module("engine_worker.model.quantization.fp8_cuda").Fp8Linear  # imports triton
    runner = load(directory, device, "bf16", "all at once", "none")
    number = sum(isinstance(one, linear) for one in gc.get_objects())
    del runner
    return number


def main() -> None:
    directory, device = Path(sys.argv[1]), sys.argv[3] if len(sys.argv) > 3 else "cuda"
    result = {"linear_layers": num_linear_layers(directory, device)}
    print(json.dumps(result | {"kv": {kv: outputs_by_schedule(directory, device, kv) for kv in DTYPES}}))


if __name__ == "__main__":
    main()
