"""Qwen2.5-Coder-0.5B-Instruct and Gemma 3 270M from GGUF files give the tokens of transformers."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from gateway.text.served_model import load_served_model
from tests.builders import make_request
from tests.engine_worker.execution.reference import generate, make_runner

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
    runner = make_runner(directory, num_blocks=128)
    requests = [make_request(ids, name, max_tokens=TOKENS, ignore_eos=True) for name, ids in prompts.items()]
    outputs, _ = generate(runner, requests, max_num_seqs=8, max_num_batched_tokens=64)
    reference = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    agreed = 0
    for name, ids in prompts.items():
        with torch.inference_mode():
            logits = reference(torch.tensor([ids + outputs[name][:-1]]), logits_to_keep=TOKENS).logits[0]
        agreed += int((logits.argmax(-1) == torch.tensor(outputs[name])).sum())
    assert agreed >= 0.98 * TOKENS * len(texts), agreed
