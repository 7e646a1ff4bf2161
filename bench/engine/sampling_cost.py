"""What each parameter of sampling costs a decode step of 256 sequences: a section of `python -m bench engine-cases`.

Every case has the same prompts, so that only the first one computes them.
"""

import random
from collections.abc import Iterator
from typing import Any

from bench.engine.sections import Bench
from bench.engine.session import step_figures
from shared.messages import SamplingParams

BATCH = 256
PROMPT_TOKENS = (4096, 1024)
OUTPUT_TOKENS = 192  # more than the steps that compute 256 prompts of 4,096 tokens
PENALTIES = {"repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.1}


def features(token_ids: range) -> dict[str, dict[str, Any]]:
    """Return the parameters of each case: the largest that the API takes, or nearly."""
    source = random.Random(5)
    drawn = [source.choice(token_ids) for _ in range(2000)]
    return {
        "none": {},
        "repetition_penalty": {"repetition_penalty": 1.1},
        "three penalties": PENALTIES,
        "logit_bias 300": {"logit_bias": dict.fromkeys(drawn[:300], -2.0)},
        "bad_words 500 of one token": {"bad_words": tuple((token_id,) for token_id in drawn[:500])},
        "bad_words 500 of two tokens": {"bad_words": tuple(zip(drawn[:500], drawn[500:1000], strict=True))},
        "min_tokens": {"min_tokens": OUTPUT_TOKENS, "stop_token_ids": tuple(drawn[:4])},
        "allowed_token_ids 1000": {"allowed_token_ids": tuple(drawn[:1000])},
        "logprobs 0": {"logprobs": 0},
        "logprobs 20": {"logprobs": 20},
        "min_p": {"temperature": 1.0, "min_p": 0.05},
        "top_p": {"temperature": 1.0, "top_p": 0.9},
        "all": {
            "temperature": 1.0, "top_p": 0.9, "logprobs": 20, "min_tokens": OUTPUT_TOKENS, **PENALTIES,
            "logit_bias": dict.fromkeys(drawn[:300], -2.0), "allowed_token_ids": tuple(drawn[:1000]),
        },
    }  # fmt: skip


def sampling_cost(bench: Bench) -> Iterator[dict[str, Any]]:
    """Yield the time of a step with each parameter, and its ratio to that of none before and after."""
    kv_cache = bench.session.stats().kv_cache
    for prompt_tokens in PROMPT_TOKENS:
        if BATCH * (prompt_tokens + OUTPUT_TOKENS) > kv_cache.num_blocks * kv_cache.block_size:
            yield {"what": "sampling_cost", "prompt": prompt_tokens, "skipped": "its KV does not fit"}
            continue
        prompts = [bench.prompt(prompt_tokens) for _ in range(BATCH)]
        before = 0.0
        for name, changes in {"to compute the prompts": {}, **features(bench.token_ids), "none again": {}}.items():
            greedy = {"temperature": 0.0, "ignore_eos": True, "max_tokens": OUTPUT_TOKENS, "seed": 0}
            sampling = SamplingParams(**{**greedy, **changes})
            log = bench.session.run([(prompt, sampling) for prompt in prompts])
            figures = step_figures(log.steady_step_seconds(BATCH))
            before = figures["p50_ms"] if name == "none" else before
            ratio = round(figures["p50_ms"] / before, 4) if before else None
            yield {"what": "sampling_cost", "case": name, "prompt": prompt_tokens, **figures, "ratio": ratio}
