"""Check that too little KV memory changes no token.

    python -m bench pressure-exactness --model DIR --trace FILE --deterministic

The same requests, half of them greedy, run with room for all and with so few blocks that sequences are preempted: by
swap, by recompute, and by recompute with prefixes kept on the host. All outputs must equal the first. Random weights
suffice. Without --deterministic results depend on the batch, so outputs on CUDA differ; a CPU needs --dtype float32.
Writes OUT/pressure_exactness.json; the exit status is 1 if a token differs.
"""

import argparse
import json
import random
from pathlib import Path
from typing import Any

from bench.kernel.kv_transfers import make_engine
from bench.provenance import provenance
from bench.workload import read_trace
from engine_worker.engine import Engine
from engine_worker.execution.load.load import load_model_runner
from engine_worker.execution.settings import ExecutionSettings
from engine_worker.execution.step.model_runner import ModelRunner
from engine_worker.kv.preemption import HostTierConfig, PreemptionMode
from shared.messages import GenerationRequest, SamplingParams, TokenEvent

Lengths = list[tuple[int, int]]
Outputs = dict[str, list[int]]

HOST_POOLS = {
    "swap": PreemptionMode.SWAP,
    "recompute": None,
    "recompute, prefixes on the host": PreemptionMode.RECOMPUTE,
}


def make_requests(lengths: Lengths, vocab_size: int, seed: int) -> list[GenerationRequest]:
    source = random.Random(seed)
    return [
        GenerationRequest(
            request_id=str(number),
            prompt_token_ids=source.choices(range(3, vocab_size), k=prompt_tokens),
            sampling=SamplingParams(
                max_tokens=output_tokens, seed=number, temperature=float(number % 2), ignore_eos=True
            ),
        )
        for number, (prompt_tokens, output_tokens) in enumerate(lengths)
    ]


def compare(runner: ModelRunner, requests: list[GenerationRequest], num_blocks: int) -> dict[str, Any]:
    """Compare outputs with all of the runner's blocks and with `num_blocks`."""
    expected = run(make_engine(runner), requests)
    figures: dict[str, Any] = {
        "requests": len(requests),
        "tokens": sum(map(len, expected.values())),
        "kv_tokens": (num_blocks - 1) * runner.block_size,
    }
    for name, mode in HOST_POOLS.items():
        host = HostTierConfig(num_blocks=runner.num_host_blocks, preemption_mode=mode) if mode else None
        engine = make_engine(runner, num_blocks=num_blocks, host=host)
        found = run(engine, requests)
        counters = engine.stats().counters
        figures[name] = {
            "differing_requests": sum(found[request_id] != tokens for request_id, tokens in expected.items()),
            "preemptions": dict(counters.preemptions),
            "recomputed_tokens": counters.recomputed_tokens,
            "swapped_in_blocks": counters.swapped_in_blocks,
        }
    return figures


def run(engine: Engine, requests: list[GenerationRequest]) -> Outputs:
    outputs: Outputs = {request.request_id: [] for request in requests}
    for request in requests:
        engine.add_request(request)
    while engine.has_work:
        for event in engine.step():
            if isinstance(event, TokenEvent):
                outputs[event.request_id] += event.token_ids
    engine.check_integrity()
    return outputs


def main(argv: list[str]) -> int:
    options = _parser().parse_args(argv)
    settings = ExecutionSettings(
        model=options.model,
        device=options.device,
        dtype=options.dtype,
        load_format="dummy",
        deterministic=options.deterministic,
        kv_cache_memory_bytes=options.kv_cache_memory_bytes,
        swap_space_bytes=options.swap_space_bytes,
        max_model_len=2048,
        max_num_seqs=96,
        max_num_batched_tokens=8192,
    )
    runner = load_model_runner(settings, lambda phase, progress, detail: None)
    lengths = read_trace(options.trace)[: options.num_requests]
    requests = make_requests(lengths, runner.model_spec.vocab_size, options.seed)
    figures = compare(runner, requests, options.kv_tokens // runner.block_size + 1)
    report = {**provenance(["pressure-exactness", *argv]), "deterministic": options.deterministic, **figures}
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "pressure_exactness.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(figures))
    return 1 if any(figures[name]["differing_requests"] for name in HOST_POOLS) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench pressure-exactness", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--model", metavar="PATH", type=Path, required=True)
    parser.add_argument(
        "--trace", metavar="PATH", type=Path, required=True, help="JSON list of [prompt_tokens, output_tokens]"
    )
    parser.add_argument("--num-requests", metavar="N", type=int, default=96)
    parser.add_argument(
        "--kv-tokens", metavar="N", type=int, default=8192, help="tokens of the small KV cache (default: %(default)s)"
    )
    parser.add_argument("--device", metavar="NAME", default="auto")
    parser.add_argument("--dtype", metavar="NAME", default="auto")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--kv-cache-memory-bytes", metavar="BYTES", type=int, default=12 * 2**30)
    parser.add_argument("--swap-space-bytes", metavar="BYTES", type=int, default=4 * 2**30)
    parser.add_argument("--seed", metavar="N", type=int, default=0)
    parser.add_argument("--out", metavar="PATH", type=Path, default=Path("bench/results"))
    return parser
