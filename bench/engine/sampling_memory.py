"""python -m bench sampling-memory: random sampling steps on CUDA take no more memory than the step measured at start.

Steps of random sizes and parameters, grammars left out, over random logits. Prints one JSON object and writes
OUT/sampling_memory.json; exits with 1 if a step allocated more than the measured one.
"""

import argparse
import json
import random
import time
from pathlib import Path
from typing import Any

import torch

from bench.provenance import provenance
from engine_worker.execution.load.step_memory import sample_largest
from engine_worker.execution.sampling.beam_candidates import launch_beam_candidates
from engine_worker.execution.sampling.sampler import Sampler
from engine_worker.kv.sequence import Sequence
from shared.messages import SamplingParams

MAX_BEAM_WIDTH = 64


def random_sampling(source: random.Random, vocab_size: int) -> SamplingParams:
    """Return random sampling parameters; each parameter is set in some requests only."""

    def some(max_count: int) -> tuple[int, ...]:
        return tuple({source.randrange(vocab_size) for _ in range(source.randint(1, max_count))})

    chosen: dict[str, Any] = {"max_tokens": 100, "seed": source.randrange(2**32), "temperature": 0.0}
    options: list[dict[str, Any]] = [
        {"temperature": 1.0},
        {"temperature": 0.7, "top_p": 0.9},
        {"temperature": 1.3, "top_k": 50, "min_p": 0.02},
        {"repetition_penalty": 1.2},
        {"presence_penalty": 0.5, "frequency_penalty": -0.2},
        {"min_tokens": 50, "stop_token_ids": some(4)},
        {"logit_bias": dict.fromkeys(some(300), 1.5)},
        {"bad_words": tuple((token_id,) for token_id in some(500))},
        {"allowed_token_ids": some(1000)},
        {"logprobs": source.randint(0, 20)},
        {"logprobs": 0, "logprob_token_ids": some(128)},
    ]
    for option in options:
        if source.random() < source.choice((0.1, 0.5)):
            chosen |= option
    return SamplingParams(**chosen)


def random_batch(source: random.Random, most: int, vocab_size: int) -> list[Sequence]:
    num_rows = max(1, round(most ** source.random())) if source.random() < 0.97 else most
    kinds = [random_sampling(source, vocab_size) for _ in range(source.randint(1, 4))]
    batch = [
        Sequence(
            str(row), [1] * source.randint(1, 64), source.choice(kinds), output_token_ids=[2] * source.randint(0, 9)
        )
        for row in range(num_rows)
    ]
    width = min(source.randint(2, MAX_BEAM_WIDTH), num_rows)
    beams = SamplingParams(max_tokens=9, seed=0, temperature=0.0, use_beam_search=True, beam_width=width)
    for search in range(source.choice((0, 0, 0, num_rows // width))):
        for row in range(search * width, (search + 1) * width):
            batch[row] = Sequence(f"beams {search}", [1], beams)
    return batch


@torch.inference_mode()
def measure(num_steps: int, max_num_seqs: int, vocab_size: int, seed: int = 1) -> dict[str, Any]:
    """Return the bytes that the measured step and the largest of `num_steps` random ones allocate."""
    device, source = torch.device("cuda"), random.Random(seed)
    sampler = Sampler(vocab_size, [2], max_num_seqs, device)
    logits = 3 * torch.randn(max_num_seqs, vocab_size, device=device)
    sampler.sample(logits[:1], [Sequence("first", [1], SamplingParams(max_tokens=1, seed=0))])
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    sample_largest(sampler, logits, 16)
    measured = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.reset_peak_memory_stats(device)
    reserved, started, num_rows = torch.cuda.memory_reserved(device), time.monotonic(), 0
    batch, steps_left = list[Sequence](), 0
    for _ in range(num_steps):
        if not steps_left:
            batch, steps_left = random_batch(source, max_num_seqs, vocab_size), source.randint(1, 8)
        steps_left -= 1
        num_rows += len(batch)
        part = logits[: len(batch)]
        candidates = launch_beam_candidates(part, batch)
        samples = sampler.sample(part, batch)
        candidates.collect()
        assert not samples.failures, samples.failures
    return {
        "steps": num_steps,
        "rows": num_rows,
        "seconds": round(time.monotonic() - started, 1),
        "measured_bytes": measured,
        "largest_bytes": torch.cuda.max_memory_allocated(device) - before,
        "reserved_growth_bytes": torch.cuda.memory_reserved(device) - reserved,
        "passed": torch.cuda.max_memory_allocated(device) - before <= measured,
    }


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench sampling-memory", description=__doc__)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--max-num-seqs", type=int, default=1024)
    parser.add_argument("--vocab-size", type=int, default=151_936)
    parser.add_argument("--out", type=Path, required=True, help="folder for sampling_memory.json")
    options = parser.parse_args(argv)
    result = measure(options.steps, options.max_num_seqs, options.vocab_size)
    report = {**provenance(["sampling-memory", *argv]), "device": torch.cuda.get_device_name(), **result}
    print(json.dumps(report))
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "sampling_memory.json").write_text(json.dumps(report, indent=1))
    return 0 if result["passed"] else 1
