"""python -m bench restarts --restarts 5 -- WORKER FLAGS: `--deterministic` gives the same bits after every restart.

Each restart is a process that loads the engine and answers the same prompts with log-probabilities: greedy, random and
penalized ones. The third has little free memory, because another process holds it; the fourth compiles every kernel
again. Tokens and log-probabilities are compared by their bits. Writes OUT/restarts.json; exits with 1 on a difference.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from bench.provenance import provenance

NUM_PROMPTS = 64
LITTLE_MEMORY, COLD_CACHE = 2, 3  # numbers of restarts
_HOLD = """
import sys, torch
free, _ = torch.cuda.mem_get_info()
held = torch.empty(max(0, free - int(float(sys.argv[1]) * 2**30)), dtype=torch.uint8, device="cuda")
print(len(held), flush=True)
sys.stdin.read()
"""


def main(argv: list[str]) -> int:
    at = argv.index("--") if "--" in argv else len(argv)
    parser = argparse.ArgumentParser(prog="python -m bench restarts", description=__doc__)
    parser.add_argument("--restarts", type=int, default=5)
    parser.add_argument("--left-gib", type=float, default=24.0, help="free memory of the third restart")
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--out", type=Path, required=True, help="folder for restarts.json")
    parser.add_argument("--answer", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(argv[:at])
    if options.answer is not None:
        options.answer.write_text(json.dumps(_answers(options, argv[at + 1 :])))
        return 0
    runs = [_restart(number, argv) for number in range(options.restarts)]
    first = runs[0]["answers"]
    rows = [
        {
            "restart": number,
            "conditions": run["conditions"],
            "start_seconds": run["start_seconds"],
            "kv_blocks": run["kv_blocks"],
            "equal_texts": sum(a[0] == b[0] for a, b in zip(run["answers"], first, strict=True)),
            "equal_logprobs": sum(a[1] == b[1] for a, b in zip(run["answers"], first, strict=True)),
        }
        for number, run in enumerate(runs)
    ]
    passed = all(row["equal_texts"] == row["equal_logprobs"] == NUM_PROMPTS for row in rows)
    report = {**provenance(["restarts", *argv]), "prompts": NUM_PROMPTS, "restarts": rows, "passed": passed}
    print(json.dumps(report))
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "restarts.json").write_text(json.dumps(report, indent=1))
    return 0 if passed else 1


def _restart(number: int, argv: list[str]) -> dict[str, Any]:
    options = argv[: argv.index("--")]
    left_gib = options[options.index("--left-gib") + 1] if "--left-gib" in options else "24"
    with tempfile.TemporaryDirectory() as directory, _held(left_gib) if number == LITTLE_MEMORY else nullcontext():
        answer = Path(directory) / "answer.json"
        environ = {**os.environ, "TRITON_CACHE_DIR": directory} if number == COLD_CACHE else dict(os.environ)
        command = [sys.executable, "-m", "bench", "restarts", "--answer", str(answer), *argv]
        subprocess.run(command, env=environ, check=True)
        conditions = {LITTLE_MEMORY: f"{left_gib} GiB free", COLD_CACHE: "cold kernel cache"}.get(number, "")
        return {**json.loads(answer.read_text()), "conditions": conditions}


@contextmanager
def _held(left_gib: str) -> Iterator[None]:
    """Another process holds the device's memory, but for `left_gib` GiB."""
    command = [sys.executable, "-c", _HOLD, left_gib]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield
        process.kill()


def _answers(options: argparse.Namespace, worker_flags: list[str]) -> dict[str, Any]:
    """Answers by prompt: token ids, and log-probabilities as they leave the worker, in hexadecimal digits."""
    from engine_worker.__main__ import load_engine  # noqa: PLC0415 - imports torch, which the parent need not
    from engine_worker.settings import WorkerSettings  # noqa: PLC0415
    from shared.messages import ErrorEvent, GenerationRequest, SamplingParams, TokenEvent  # noqa: PLC0415
    from shared.settings import load_settings  # noqa: PLC0415

    started = time.monotonic()
    settings = load_settings(WorkerSettings, worker_flags, os.environ, prog="restarts").settings
    loaded = load_engine(settings, lambda phase, progress, detail: None)
    start_seconds = time.monotonic() - started
    engine, source = loaded.engine, random.Random(1)
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0, "top_p": 0.9},
        {"repetition_penalty": 1.2},
    ]
    for number in range(NUM_PROMPTS):
        prompt = [source.randrange(100, 49_000) for _ in range(source.choice((20, 300, 1500)))]
        sampling = SamplingParams(
            max_tokens=options.output_tokens, ignore_eos=True, logprobs=3, **{"seed": number, **kinds[number % 3]}
        )
        engine.add_request(GenerationRequest(request_id=str(number), prompt_token_ids=prompt, sampling=sampling))
    answers: list[tuple[list[int], list[str]]] = [([], []) for _ in range(NUM_PROMPTS)]
    while engine.has_work:
        for event in engine.step():
            if isinstance(event, ErrorEvent):
                raise RuntimeError(event.message)
            if isinstance(event, TokenEvent):
                token_ids, logprobs = answers[int(event.request_id)]
                token_ids += event.token_ids
                logprobs += [bytes(one).hex() for one in event.logprobs or []]
    kv_blocks = engine.stats().kv_cache.num_blocks
    return {"answers": answers, "start_seconds": round(start_seconds, 1), "kv_blocks": kv_blocks}
