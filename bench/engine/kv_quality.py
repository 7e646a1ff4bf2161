"""Quality beside the type of the KV cache: perplexity, and how often the likeliest token stays the same.

    python -m bench kv-quality MODEL_DIR --text FILE [FILE ...] --out FILE [--kv-cache-dtypes auto bf16 fp8]
                               [--dtype auto] [--windows 16] [--tokens 512] [--threads N]

The texts are cut into windows of so many tokens, which are scored as prompts by the whole engine, once with each type;
the first type is what the others are held against. Scores are those of `prompt_logprobs`.
"""

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from bench.engine.side import plain_engine
from bench.provenance import provenance
from engine_worker.execution.load import load_model_runner
from engine_worker.execution.settings import ExecutionSettings
from engine_worker.kv.layout import KV_CACHE_DTYPES
from engine_worker.scheduling.scheduler import SchedulerConfig
from shared.messages import ErrorEvent, GenerationRequest, SamplingParams, TokenEvent, TokenLogprobs

_STEP_TOKENS = 256  # windows come in chunks, so that keys are read from the cache as they are in serving


def windows_of(tokenizer: Tokenizer, files: Sequence[Path], size: int, most: int) -> list[list[int]]:
    """As many windows of each file, from its beginning on."""
    each = -(-most // len(files))
    windows = []
    for file in files:
        token_ids: list[int] = tokenizer.encode(file.read_text()).ids
        windows += [token_ids[start : start + size] for start in range(0, len(token_ids) - size + 1, size)][:each]
    return windows[:most]


def scores_of(settings: ExecutionSettings, windows: list[list[int]]) -> list[TokenLogprobs]:
    """Scores of all tokens of all windows but their first ones."""
    runner = load_model_runner(settings, lambda phase, progress, detail: None)
    assert settings.max_model_len is not None
    config = SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=_STEP_TOKENS, max_model_len=settings.max_model_len)
    engine = plain_engine(runner, config)
    scores: list[TokenLogprobs] = []
    sampling = SamplingParams(max_tokens=1, seed=0, temperature=0.0, ignore_eos=True, prompt_logprobs=1)
    for number, window in enumerate(windows):
        engine.add_request(GenerationRequest(request_id=str(number), prompt_token_ids=window, sampling=sampling))
        while engine.has_work:
            for event in engine.step():
                if isinstance(event, ErrorEvent):
                    raise RuntimeError(f"window {number}: {event.message}")
                if isinstance(event, TokenEvent) and event.prompt_logprobs is not None:
                    scores += event.prompt_logprobs.tokens
    return scores


def compared(scores: list[TokenLogprobs], first: list[TokenLogprobs]) -> dict[str, Any]:
    perplexity, reference = (math.exp(-sum(s.logprob for s in which) / len(which)) for which in (scores, first))
    same = sum(one.top_token_ids[0] == other.top_token_ids[0] for one, other in zip(scores, first, strict=True))
    return {
        "perplexity": perplexity,
        "perplexity_change_percent": 100 * (perplexity / reference - 1),
        "top_1_agreement_percent": 100 * same / len(scores),
        "tokens": len(scores),
    }


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--text", type=Path, nargs="+", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--kv-cache-dtypes", nargs="+", choices=KV_CACHE_DTYPES, default=["auto", "bf16", "fp8"])
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--threads", type=int, default=None)
    options = parser.parse_args(argv)
    tokenizer = Tokenizer.from_file(str(options.model / "tokenizer.json"))
    windows = windows_of(tokenizer, options.text, options.tokens, options.windows)
    figures: dict[str, Any] = {}
    first: list[TokenLogprobs] = []
    for name in options.kv_cache_dtypes:
        settings = ExecutionSettings(
            model=options.model,
            dtype=options.dtype,
            kv_cache_dtype=name,
            num_threads=options.threads,
            max_model_len=options.tokens + 16,
            max_num_seqs=2,
            max_num_batched_tokens=_STEP_TOKENS,
        )
        scores = scores_of(settings, windows)
        first = first or scores
        figures[name] = compared(scores, first)
        print(name, json.dumps(figures[name]), flush=True)
    report = {**provenance(["kv-quality", *argv]), "windows": len(windows), "figures": figures}
    options.out.write_text(json.dumps(report, indent=1) + "\n")
    return 0
