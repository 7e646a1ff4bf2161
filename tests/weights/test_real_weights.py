"""Qwen2.5-Coder-0.5B-Instruct and Gemma 3 270M from GGUF files give the tokens of transformers."""

import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from gateway.text.served_model import load_served_model
from shared.messages import TokenEvent, decoded_logprobs
from tests.builders import make_request
from tests.engine_worker.execution.reference import generate, make_engine, make_runner

pytestmark = [pytest.mark.weights, pytest.mark.timeout(1800)]

TEXTS = (
    "def quicksort(items):\n",
    "The three laws of thermodynamics are",
    "import asyncio\n\nasync def main():\n    async with",
    "SELECT name, count(*) FROM orders",
    "一个简单的例子：",
    "Dear customer,\nthank you for your order of",
)
LONGER_THAN_A_WINDOW = " ".join(f"Line {number} says {number * number}." for number in range(90))
TOKENS = 32


@pytest.mark.parametrize("model", ["qwen_dir", "gemma_dir"])
def test_tokens_are_the_likeliest_of_transformers(model: str, request: pytest.FixtureRequest) -> None:
    """Compare in float32, token by token on the same prefix; only rounding decides near ties."""
    directory: Path = request.getfixturevalue(model)
    encoder = load_served_model(directory).encoder
    texts = (*TEXTS, LONGER_THAN_A_WINDOW)
    prompts = {f"p{number}": encoder.encode_text(text) for number, text in enumerate(texts)}
    runner = make_runner(directory, num_blocks=512)
    requests = [make_request(ids, name, max_tokens=TOKENS, ignore_eos=True) for name, ids in prompts.items()]
    outputs, _ = generate(runner, requests, max_num_seqs=8, max_num_batched_tokens=64)
    reference = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    agreed = 0
    for name, ids in prompts.items():
        with torch.inference_mode():
            logits = reference(torch.tensor([ids + outputs[name][:-1]]), logits_to_keep=TOKENS).logits[0]
        agreed += int((logits.argmax(-1) == torch.tensor(outputs[name])).sum())
    assert agreed >= 0.98 * TOKENS * len(texts), agreed


def test_perplexity_of_gemma_is_that_of_transformers(gemma_dir: Path) -> None:
    """Compare in float32, over a text that is longer than a window."""
    token_ids = load_served_model(gemma_dir).encoder.encode_text(LONGER_THAN_A_WINDOW)
    assert len(token_ids) > 600
    engine = make_engine(make_runner(gemma_dir, num_blocks=512), max_num_seqs=1, max_num_batched_tokens=200)
    engine.add_request(make_request(token_ids, "p", max_tokens=1, ignore_eos=True, prompt_logprobs=0))
    scores = []
    while engine.has_work:
        found = (event.prompt_logprobs for event in engine.step() if isinstance(event, TokenEvent))
        scores += [entry for part in found if part is not None for entry in decoded_logprobs(part.tokens)]
    ours = -sum(entry.logprob for entry in scores) / len(scores)
    reference = AutoModelForCausalLM.from_pretrained(gemma_dir, dtype=torch.float32)
    ids = torch.tensor([token_ids])
    with torch.inference_mode():
        theirs = float(reference(ids, labels=ids).loss)
    assert len(scores) == len(token_ids) - 1
    assert abs(math.exp(ours - theirs) - 1) < 0.001, (ours, theirs)
