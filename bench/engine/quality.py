"""Measure the quality loss of fewer bits: perplexity and top tokens of a quantized model.

    python -m bench quality MODEL_DIR --out FILE --quantization fp8

The same texts (default: docs/) are scored by the unquantized model with its own KV dtype and with the given flags. The
result has both word perplexities and the share of tokens with the same top token. A window comes in two chunks, so keys
and values are read from the cache as in serving. On a CPU fp8 weights are dequantized, so inputs keep their 16 or 32
bits; on CUDA inputs are quantized, too.
"""

import argparse
import gc
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from bench.engine.side import plain_engine
from bench.provenance import provenance
from engine_worker.execution.load.load import load_model_runner
from engine_worker.execution.settings import QUANTIZATIONS, ExecutionSettings
from engine_worker.kv.layout import KV_CACHE_DTYPES
from engine_worker.scheduling.scheduler import SchedulerConfig
from shared.messages import ErrorEvent, GenerationRequest, SamplingParams, TokenEvent, decoded_logprobs

PAGES = Path(__file__).resolve().parents[2] / "docs"
_ROWS = 8


@dataclass
class Scores:
    """Log-probabilities and top tokens of all tokens except the first of each window."""

    log_probabilities: list[float] = field(default_factory=list)
    likeliest: list[int] = field(default_factory=list)


def windows_of(tokenizer: Tokenizer, texts: Sequence[str], length: int, max_tokens: int) -> list[list[int]]:
    """Cut the texts into whole windows of `length` tokens, at most `max_tokens` in total."""
    windows = [
        window for text in texts for window in _cut(tokenizer.encode(text, add_special_tokens=False).ids, length)
    ]
    return windows[: max(1, max_tokens // length)]


def _cut(token_ids: list[int], length: int) -> Iterator[list[int]]:
    for start in range(0, len(token_ids) - length + 1, length):
        yield token_ids[start : start + length]


def scores(settings: ExecutionSettings, windows: Sequence[list[int]]) -> Scores:
    assert settings.max_num_batched_tokens is not None
    runner = load_model_runner(settings, lambda phase, progress, detail: None)
    config = SchedulerConfig(
        max_num_seqs=_ROWS,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_model_len=runner.max_model_len,
    )
    engine, sampling = plain_engine(runner, config), SamplingParams(max_tokens=1, seed=0, prompt_logprobs=1)
    for index, window in enumerate(windows):
        engine.add_request(GenerationRequest(request_id=str(index), prompt_token_ids=window, sampling=sampling))
    found: dict[tuple[int, int], tuple[float, int]] = {}
    while engine.has_work:
        for event in engine.step():
            if isinstance(event, ErrorEvent):
                raise RuntimeError(f"window {event.request_id}: {event.message}")
            if isinstance(event, TokenEvent) and event.prompt_logprobs is not None:
                tokens = decoded_logprobs(event.prompt_logprobs.tokens)
                for place, entry in enumerate(tokens, event.prompt_logprobs.start):
                    found[int(event.request_id), place] = entry.logprob, entry.top_token_ids[0]
    ordered = [found[key] for key in sorted(found)]
    assert len(ordered) == sum(len(window) - 1 for window in windows)
    return Scores([probability for probability, _ in ordered], [token_id for _, token_id in ordered])


def compared(exact: Scores, fewer: Scores, num_words: int) -> dict[str, float]:
    perplexities = [math.exp(-sum(side.log_probabilities) / num_words) for side in (exact, fewer)]
    same = sum(one == other for one, other in zip(exact.likeliest, fewer.likeliest, strict=True))
    return {
        "word_perplexity": round(perplexities[0], 4),
        "word_perplexity_with_fewer_bits": round(perplexities[1], 4),
        "word_perplexity_change": round(perplexities[1] / perplexities[0] - 1, 5),
        "same_likeliest_token": round(same / len(exact.likeliest), 5),
    }


def main(argv: list[str]) -> int:
    options = _parser().parse_args(argv)
    tokenizer = Tokenizer.from_file(str(options.model / "tokenizer.json"))
    texts = [path.read_text() for path in options.texts or sorted(PAGES.rglob("*.md"))]
    windows = windows_of(tokenizer, texts, options.window, options.max_tokens)
    num_words = sum(len(tokenizer.decode(window[1:]).split()) for window in windows)
    common: dict[str, Any] = {
        "model": options.model, "device": options.device, "dtype": options.dtype, "max_num_seqs": _ROWS,
        "max_num_batched_tokens": options.window // 2, "max_model_len": options.window + 1, "cudagraph_mode": "none",
        "num_threads": options.threads, "kv_cache_memory_bytes": 2**30,
    }  # fmt: skip
    exact = scores(ExecutionSettings(**common, quantization="none"), windows)
    gc.collect()
    torch.cuda.empty_cache()
    changed: dict[str, Any] = {"quantization": options.quantization, "kv_cache_dtype": options.kv_cache_dtype}
    changed["int4_group_size"] = options.int4_group_size
    fewer = scores(ExecutionSettings(**common, **changed), windows)
    result = {
        **provenance(["quality", *argv]),
        "model": options.model.name,
        **changed,
        "tokens": len(exact.likeliest),
        "words": num_words,
        **compared(exact, fewer, num_words),
    }
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench quality", description=__doc__.splitlines()[0])
    parser.add_argument("model", metavar="PATH", type=Path)
    parser.add_argument("--out", metavar="PATH", type=Path, required=True)
    parser.add_argument("--quantization", choices=QUANTIZATIONS, default="auto")
    parser.add_argument("--int4-group-size", metavar="N", type=int, default=None)
    parser.add_argument("--kv-cache-dtype", choices=KV_CACHE_DTYPES, default="auto")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", metavar="NAME", default="auto")
    parser.add_argument("--texts", metavar="PATH", type=Path, nargs="+")
    parser.add_argument(
        "--window", metavar="N", type=int, default=256, help="tokens scored together (default: %(default)s)"
    )
    parser.add_argument("--max-tokens", metavar="N", type=int, default=16384)
    parser.add_argument("--threads", metavar="N", type=int, default=None)
    return parser
